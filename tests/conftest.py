import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small, threads cost more time than they save
os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never ask the hub
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


def pytest_configure(config):
    """Hides the GPU without `-m gpu`, also from processes that tests start: they compare with numbers of a CPU."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
