import gc
import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small, threads cost more time than they save
os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never ask the hub
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


def pytest_configure(config):
    """Hides the GPU without `-m gpu`, also from processes that tests start."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """Tests that fork come first: threads may hang a fork."""
    first = ["test_processes.py"]
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Saves seconds: bitsandbytes would import the compiler, and searches for garbage would see all imports."""
    import torch
    gc.set_threshold(100_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        yield
    gc.freeze()


def remembered(function, folder_at, copy):
    """The function, called once per content of the folder that is argument `folder_at`."""
    results = {}

    def call(*inputs, **options):
        files = sorted(Path(inputs[folder_at]).glob("*"))
        key = *map(str, inputs), str(options), os.getcwd(), *((str(file), file.stat().st_mtime_ns) for file in files)
        if key not in results:
            results[key] = function(*inputs, **options)
        return copy(results[key])
    return call


@pytest.fixture(autouse=True, scope="session")
def each_model_is_loaded_and_tested_once():
    """A short run would spend most of its time on that. Tests of that test call it anew."""
    import dpo
    import kto
    import refcache
    import rloo
    models, tokenizers = dpo.AutoModelForCausalLM, dpo.AutoTokenizer
    enable, check = dpo.enable_shared_prompts, refcache.check_exact
    found = {}  # what was tested -> None, or the exception

    def remembered_check(core, lay_out):
        kinds = sorted({(type(module).__name__, str(getattr(module, "scaling", ""))) for module in core.modules()})
        dtypes = sorted({str(weight.dtype) for weight in core.parameters()})
        config = core.config.to_dict() | {"_name_or_path": None}  # processes must test alike
        key = str((config, kinds, dtypes, lay_out))
        if key not in found:
            try:
                found[key] = check(core, lay_out)
            except Exception as error:
                found[key] = error
        if found[key]:
            raise found[key]

    def enable_shared_prompts(model):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(refcache, "check_exact", remembered_check)
            return enable(model)

    with pytest.MonkeyPatch.context() as patch:
        model = remembered(models.from_pretrained, 0, deepcopy)
        tokenizer = remembered(tokenizers.from_pretrained, 0, lambda tokenizer: tokenizer)  # which no script changes
        replaced = dict(AutoModelForCausalLM=SimpleNamespace(from_pretrained=model),
                        AutoTokenizer=SimpleNamespace(from_pretrained=tokenizer),
                        enable_shared_prompts=enable_shared_prompts)
        for script in (dpo, kto, rloo):
            for name, function in replaced.items():
                patch.setattr(script, name, function)
        patch.setattr(os, "fsync", lambda file: None)  # it would wait for the files of other processes, too
        yield


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
