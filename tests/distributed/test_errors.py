import threading
import time

import pytest

from tests.cases.base import OPS, Case, call, check, make
from tests.cases.errors import ErrorCases


def second_thread(ctx, op):
    """While a thread waits for the peers in a call, another one is refused; the first one's result is right."""
    case = Case(op, 16, 24, 40)
    assert check(ctx, case) is None
    if ctx.rank == 0:
        results = []
        operands = make(ctx, case)
        first = threading.Thread(target=lambda: results.append(check(ctx, case)))
        first.start()
        time.sleep(1)
        with pytest.raises(RuntimeError, match=f"{op}: another thread is in a call on group"):
            call(operands)
        first.join()
        assert results == [None]
    else:
        time.sleep(3)
        assert check(ctx, case) is None
    assert check(ctx, case) is None


class TestErrors(ErrorCases):
    pass


class TestThreads:
    @pytest.mark.worlds(2)
    @pytest.mark.parametrize("op", OPS)
    def test_a_second_thread_is_refused(self, ranks, op):
        ranks.run(second_thread, op)
