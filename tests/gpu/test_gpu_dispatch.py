import pytest

from tests.cases.dispatch import DispatchCases
from tests.cases.tuner import decomposed_entry


class TestGpuDispatch(DispatchCases):
    @pytest.mark.parametrize("op", ("ag_gemm", "gemm_rs"))
    def test_tuned_where_fused_can_not_run(self, ranks, op, tmp_path, record_property):
        record_property("cells", ranks.run(decomposed_entry, op, str(tmp_path))[0])
