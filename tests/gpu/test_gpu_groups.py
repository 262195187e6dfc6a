from tests.cases.groups import GroupCases


class TestGpuGroups(GroupCases):
    cycles = 8
    lives = 18
    world_of_lives = 2
