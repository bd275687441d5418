import resource
import sys

import pytest
import torch

from stoker.batch.limits import Meter, capacity_bytes, limited
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.errors import ConfigError

CPU = torch.device("cpu")
MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")


def test_memory_ends_at_the_limit_and_is_as_before_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited(CPU, 512 * MIB):
        torch.empty(64 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1024 * MIB, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    torch.empty(1024 * MIB, dtype=torch.uint8)


def test_the_limit_is_lifted_where_an_error_comes() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ValueError), limited(CPU, 512 * MIB):
        raise ValueError
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_limit_of_the_system_stays_the_lower_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lower = 2**44  # bytes: more than this process has, less than is asked for
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        with limited(CPU, 2**45):
            assert resource.getrlimit(resource.RLIMIT_AS) == (lower, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_peak_is_of_what_came_after_the_meter() -> None:
    meter = Meter(fresh=False)
    assert meter.peak_bytes(CPU) < 64 * MIB
    torch.ones(256 * MIB, dtype=torch.uint8)
    assert 250 * MIB < meter.peak_bytes(CPU) < 330 * MIB


def test_no_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited(CPU, None):
        assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert capacity_bytes(CPU) is None


def test_a_device_without_limits_is_refused() -> None:
    with pytest.raises(ConfigError, match="not on 'meta'"), limited(torch.device("meta"), MIB):
        pass
