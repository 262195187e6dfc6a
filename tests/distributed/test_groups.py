from tests.cases.groups import GroupCases


class TestGroups(GroupCases):
    cycles = 50
