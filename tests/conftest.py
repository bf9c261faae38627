import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads would slow down models this small
os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never ask the hub
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


def pytest_configure(config):
    """Hides the GPU without `-m gpu`, also from processes that tests start."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """Tests that fork come first: threads may hang a fork."""
    items.sort(key=lambda item: item.path.name != "test_processes.py")


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """ReferenceCache.fill collects garbage: quicker without what was there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """Training in bfloat16 makes a process group, which load_model leaves behind."""
    import torch.distributed as dist
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
