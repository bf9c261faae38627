"""ReferenceCache: exact, small, shared by jobs, safe against kills and against damaged or hostile files."""
import functools
import hashlib
import json
import os
import pickle
import random
import time
import weakref
from itertools import product
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import GROUPS, P, Q, bad_input, equal, flat, make, parametrize, ready, slow
from runs import adapt, needs_peft

import refcache
from refcache import ReferenceCache, checkpoint_digest

HEADER = dict(reference="abc", dtype="float32")
load_model = functools.cache(lambda: ready("llama"))  # one model for most tests


def watched(seen, name="llama", after=None):
    """Loads a model that adds the rows of each forward to `seen`, until it is interrupted before number `after`."""
    def hook(module, args):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(args[0].tolist())

    model = ready(name)
    model.get_input_embeddings().register_forward_pre_hook(hook)
    return lambda: model


def filled(groups=GROUPS, path=None):
    cache = ReferenceCache(**HEADER)
    cache.fill(load_model, groups, 30, path=path)
    return cache


def loaded(path):
    cache = ReferenceCache(**HEADER)
    cache.load(path)
    return cache


@pytest.fixture(scope="module")
def whole():
    return filled()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.pkl"


def test_holds_the_log_probs_of_every_completion(whole):
    keys = [(prompt, y) for prompt, completions in GROUPS for y in completions]
    truth = flat(slow(make("llama"), GROUPS)).detach()
    assert np.concatenate([whole[key] for key in keys]) == pytest.approx(truth, abs=1e-5)
    assert set(whole) == set(keys) and len(whole) == 8
    assert (Q + (44,), (2,)) not in whole  # the boundary is part of the key


def test_prompt_of_several_groups_is_encoded_once_and_nothing_is_padded():
    """The answers keep their order: the policy's forward has the same row then, and rounds alike."""
    rows = []
    ReferenceCache().fill(watched(rows), [(P, [(60, 2)]), (Q, [(7,)]), (P, [(12, 4, 55), (60, 2)])])
    assert rows == [[[*P, 60, 2, 12, 4, 55, *Q, 7]]]


@parametrize("name, budget, mean", [("llama", 24, 15), ("gemma2-softcaps", 50, 35)])
def test_tokens_per_forward_bounds_a_pass(name, budget, mean):
    forwards = []
    ReferenceCache().fill(watched(forwards, name), [(Q, [(i, 5, 2) for i in range(40)]), *GROUPS], budget)
    sizes = [sum(map(len, rows)) for rows in forwards]
    assert max(sizes) <= budget and np.mean(sizes) > mean


def test_fill_frees_the_model_and_then_the_memory_of_the_gpu(monkeypatch):
    models = []  # weak references
    was_alive = []  # at each call of empty_cache

    def load():
        model = ready("llama")
        model.itself = [model]  # only a search for garbage frees it
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: was_alive.append(models[-1]() is not None))
    cache = ReferenceCache()
    for _ in range(2):  # when it is full, nothing is loaded
        cache.fill(load, GROUPS)
    assert was_alive == [False]


def test_interrupted_pass_continues_where_another_job_has_scored_some(path, monkeypatch):
    groups = [(p, [(i, j, p[0]) for j in range(6)]) for i, p in enumerate([P, Q, (4, 4), (8,) * 5])]
    whole = filled([(prompt, completions[1:4]) for prompt, completions in groups], path)
    truth, first, rest = [], [], []  # forwards
    monkeypatch.setattr(refcache, "time", SimpleNamespace(monotonic=lambda: len(first)))  # a save takes no time
    whole.fill(watched(truth), groups, 20)
    with pytest.raises(KeyboardInterrupt):
        ReferenceCache(**HEADER).fill(watched(first, after=3), groups, 20, path=path)
    continued = loaded(path)
    assert 12 < len(continued) < len(whole)

    continued.fill(watched(rest), groups, 20, path=path)
    assert first + rest == truth
    assert equal(continued, whole) and equal(loaded(path), whole)
    lengths = [len(ids[0]) for ids in truth]
    assert lengths == sorted(lengths, reverse=True), "so a pass that needs too much memory fails at once"


def test_a_cache_without_a_header_takes_no_file(path, whole):
    whole.save(path)
    with bad_input("may be of any model"):
        ReferenceCache().load(path)


def test_dropout_is_off(whole):
    cache = ReferenceCache()
    cache.compute(make("llama", attention_dropout=0.5).train(), GROUPS, 30)
    assert equal(cache, whole)


def test_two_jobs_share_a_file(path, whole):
    one = ReferenceCache(**HEADER)
    one.compute(make("llama", seed=1), GROUPS[:2])  # other numbers, to tell the jobs apart
    first = one[Q, (44, 2)]
    two = filled([(Q, [(5,), (44, 2)]), *GROUPS[2:]])
    for job in (one, two, one):
        job.save(path)
        assert set(loaded(path)) == set(job)
    assert set(one) == set(whole) | {(Q, (5,))}
    assert np.array_equal(loaded(path)[Q, (44, 2)], first)  # the job that saved first decides


@parametrize("name", HEADER)
def test_file_of_another_run_is_refused_and_stays(path, whole, name):
    ReferenceCache(**HEADER | {name: "THEIRS"}).save(path)
    old = path.read_bytes()
    for use in (loaded, whole.save):
        with bad_input(f"{path} cannot be used, it was made with {name} 'THEIRS', not '{HEADER[name]}': .*delete it"):
            use(path)
    assert path.read_bytes() == old


def test_cache_of_another_model_is_refused_by_its_name(path):
    ReferenceCache(name="Qwen/A", reference="abc").save(path)
    ReferenceCache(name="a copy", reference="abc").load(path)
    with bad_input("it was made with name 'Qwen/A', not 'Qwen/B'"):
        ReferenceCache(name="Qwen/B", reference="def").load(path)


def test_a_cache_that_another_process_has_locked_is_waited_for(path, whole, capsys, monkeypatch):
    monkeypatch.setattr(refcache.lock, "__defaults__", (0.1,))  # seconds until it is told
    job = Thread(target=whole.save, args=[path])
    with refcache.lock(path):
        job.start()
        time.sleep(0.5)
        assert not path.exists() and f"{path}: waiting for another process" in capsys.readouterr().out
    job.join()
    assert equal(loaded(path), whole)


def assert_refused(path, content):
    path.write_bytes(content)
    cache = ReferenceCache(**HEADER)
    with bad_input("delete it" if b'"sha256"' in content.split(b"\n")[0] else "is no cache file: name another$"):
        cache.load(path)
    assert not cache.table


def forged(table, protocol=4):
    """A file with a true checksum."""
    pickled = pickle.dumps(table, protocol)
    header = ReferenceCache(**HEADER).header | dict(sha256=hashlib.sha256(pickled).hexdigest())
    return json.dumps(header).encode() + b"\n" + pickled


def test_hostile_pickle_runs_nothing(tmp_path, path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/hacked",)

    path.write_bytes(forged({(b"1234", b"5678"): b"\0" * 4}))
    assert len(loaded(path)) == 1
    for protocol in range(6):
        assert_refused(path, forged({(b"1234", b"5678"): Trap()}, protocol))
    assert not (tmp_path / "hacked").exists()


def test_damaged_file_is_refused(path, whole):
    whole.save(path)
    data = path.read_bytes()
    draw = random.Random(0)
    for n in range(0, len(data), 33):  # who named another file is not told to delete it
        assert_refused(path, data[:n])
    for _ in range(99):
        at = draw.randrange(len(data))
        assert_refused(path, data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1:])


def save_model(folder, change=0, size="50GB", **config):
    model = make("llama", **config)
    model.lm_head.weight.data[-1, -1] += change
    model.save_pretrained(folder, max_shard_size=size)


def test_digest_of_a_checkpoint(tmp_path):
    cases = [{}, dict(rms_norm_eps=1e-3), dict(size="50KB"), dict(change=1), dict(change=1, size="50KB")]
    for case in cases:
        save_model(tmp_path / str(case), **case)
    digests = {checkpoint_digest(tmp_path / str(case)) for case in cases}
    assert len(digests) == 5

    for case in cases:  # files that are not loaded
        for name in ("training_args.bin", "model-00009-of-00009.safetensors", "model.fp16.safetensors"):
            (tmp_path / str(case) / name).write_bytes(b"whatever")
    assert {checkpoint_digest(tmp_path / str(case)) for case in cases} == digests

    config = tmp_path / "{}/config.json"
    config.write_text(config.read_text().replace('"transformers_version": "', '"transformers_version": "9.'))
    assert checkpoint_digest(tmp_path / "{}") in digests


@needs_peft
def test_digest_of_an_adapter(tmp_path):
    digests = set()
    for change, seed in product((0, 1), (0, 1)):
        save_model(tmp_path / "base", change)
        digests.add(checkpoint_digest(adapt("of a digest", str(tmp_path / "base"), seed)))
    assert len(digests) == 4


def test_checkpoint_without_weights_has_no_digest(tmp_path):
    """Else all checkpoints of an architecture would share caches."""
    make("llama").config.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    for words in ("No such file", "deserializing header"):
        with bad_input(f"{file} is not a whole safetensors file: download it again .*{words}"):
            checkpoint_digest(tmp_path)
        file.write_text("version https://git-lfs.github.com/spec/v1")


def test_only_the_first_process_writes_the_file(path, monkeypatch):
    monkeypatch.setattr(refcache, "is_first_process", lambda: False)
    assert len(filled(path=path)) == 8 and not path.exists()


@parametrize("seconds, saves", [(1, [1, 6, 8]), (3, [1, 8])])
def test_a_save_waits_20_times_as_long_as_the_last_one_took(seconds, saves, monkeypatch):
    forwards, found = [], []
    clock = SimpleNamespace(monotonic=lambda: 5 * len(forwards) + seconds * len(found))
    monkeypatch.setattr(refcache, "time", clock)
    monkeypatch.setattr(ReferenceCache, "save", lambda *_: found.append(len(forwards)))
    ReferenceCache().fill(watched(forwards), [(Q, [(i, 2)]) for i in range(8)], 5, path="a file")
    assert found == saves
