from tests.cases.groups import GroupCases


class TestGpuGroups(GroupCases):
    cycles = 8
