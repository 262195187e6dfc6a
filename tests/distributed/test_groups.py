from tests.cases.groups import GroupCases


class TestGroups(GroupCases):
    cycles = 50
    lives = 50
    world_of_lives = 4
