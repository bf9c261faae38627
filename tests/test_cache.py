"""ReferenceCache: exact, small, shared by jobs, safe against kills and against damaged or hostile files."""
import functools
import hashlib
import os
import pickle
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import GROUPS, P, Q, bad_input, flat, make, cases, ready, slow
from runs import adapt, needs_peft

import refcache
from refcache import ReferenceCache, bytes_of, checkpoint_digest

HEADER = dict(reference="abc", dtype="float32")
load_model = functools.cache(lambda: ready("llama"))  # one model for most tests


def watched(seen, after=None):
    """Loads a model that adds the rows of each forward to `seen`, until it is interrupted before number `after`."""
    def hook(module, args):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(args[0].tolist())

    model = ready("llama")
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
    path = tmp_path / "cache.pkl"
    path.symlink_to("target.pkl")
    return path


def test_holds_the_log_probs_of_every_completion(whole):
    keys = [(prompt, y) for prompt, completions in GROUPS for y in completions]
    truth = flat(slow(make("llama"), GROUPS)).detach()
    assert np.concatenate([whole[key] for key in keys]) == pytest.approx(truth, abs=1e-5)
    assert set(whole.table) == {(bytes_of(prompt), bytes_of(y)) for prompt, y in keys} and len(whole.table) == 8
    with pytest.raises(KeyError):
        whole[Q + (44,), (2,)]  # the boundary is part of the key


def test_fill_frees_the_model_and_its_memory(monkeypatch):
    models, was_alive = [], []  # weak references; at each call of empty_cache

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
    monkeypatch.setattr(refcache, "all_gather", lambda n: [n, 5])
    with bad_input("different caches"):
        cache.fill(load, GROUPS)


def test_interrupted_pass_continues(path, monkeypatch):
    groups = [(p, [(i, j, p[0]) for j in range(6)]) for i, p in enumerate([P, Q, (4, 4), (8,) * 5])]
    whole = filled([(prompt, completions[1:4]) for prompt, completions in groups], path)
    truth, first, rest = [], [], []  # forwards
    monkeypatch.setattr(refcache, "time", SimpleNamespace(monotonic=lambda: 100 * len(first)))  # seconds
    whole.fill(watched(truth), groups, 20)
    with pytest.raises(KeyboardInterrupt):
        ReferenceCache(**HEADER).fill(watched(first, after=3), groups, 20, path=path)
    continued = loaded(path)
    assert 12 < len(continued.table) < len(whole.table)

    continued.fill(watched(rest), groups, 20, path=path)
    assert first + rest == truth
    assert continued.table == loaded(path).table == whole.table
    lengths = [len(ids[0]) for ids in truth]
    assert lengths == sorted(lengths, reverse=True)


def test_dropout_is_off(whole):
    cache = ReferenceCache()
    cache.compute(make("llama", attention_dropout=0.5).train(), GROUPS, 30)
    assert cache.table == whole.table


# --- The file

A, B, LOGPS = bytes_of((1,)), bytes_of((2,)), np.float32([-0.5]).tobytes()


def test_file_is_a_pickle_that_anybody_can_load(path, whole):
    whole.save(path)
    with open(path, "rb") as file:
        found = pickle.load(file)
    assert found["header"] == whole.header | dict(name="") and found.keys() == {"header", "answers"}
    answers = {(prompt, y): logps for prompt, ys in found["answers"].items() for y, logps in ys.items()}
    assert answers == whole.table


def test_two_jobs_share_a_file(path, whole):
    one = ReferenceCache(**HEADER)
    one.compute(make("llama", seed=1), GROUPS[:2])  # other numbers, to tell the jobs apart
    first = one[Q, (44, 2)]
    two = filled([(Q, [(5,), (44, 2)]), *GROUPS[2:]])
    for job in (one, two, one):
        job.save(path)
        assert set(loaded(path).table) == set(job.table)
    assert set(one.table) == set(whole.table) | {(bytes_of(Q), bytes_of((5,)))}
    assert path.is_symlink()
    assert np.array_equal(loaded(path)[Q, (44, 2)], first)  # the job that saved first decides
    assert np.array_equal(two[Q, (44, 2)], first)


@cases("name", HEADER)
def test_file_of_another_run_is_refused_and_stays(path, whole, name):
    """Only the name may differ."""
    other = HEADER | {name: "THEIRS"}
    ReferenceCache("Qwen/A", **other).save(path)
    old = path.read_bytes()
    for use in (loaded, whole.save):
        with bad_input(f"{path}: .* Qwen/A, .*'THEIRS'.*not with .*'{HEADER[name]}'"):
            use(path)
    assert path.read_bytes() == old
    ReferenceCache("Qwen/B", **other).load(path)


def content(answers):
    return dict(header=dict(format="6", name="", **HEADER), answers=answers)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


def nested(n):
    """A pickle with n pairs in a pair as a key, whose hash takes 2^n steps."""
    return b"\x80\x04}C\x01a" + b"2\x86" * n + b"Ns."


GOOD = pickle.dumps(content({A: {B: LOGPS}}), 4)
HOSTILE = {
    "shapes": [[1, 2], None, "text", {"answers": {}}, dict(header={}, answers={}), {A: {B: LOGPS}}],
    "answers": [content(answers) for answers in (
        [A], {A: LOGPS}, {A: [LOGPS]}, {A: {B: "text"}}, {A: {B: {B: LOGPS}}}, {A: {B: bytearray(LOGPS)}},
        {A: {(B, B): LOGPS}}, {A: {2: LOGPS}}, {A: {B: np.float32(1)}})],
    "values": [content({A: {B: logps}}) for logps in (
        b"", LOGPS[:3], LOGPS * 2, np.float32([np.nan]).tobytes(), np.float32([-np.inf]).tobytes())],
    "code": [content({A: {B: Trap()}}), Trap(), content({A: {B: os.mkdir}})],
    "bytes": [b"", b"hello", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", b"." * 99, *map(nested, (1, 24, 60)), GOOD[:-3],
              b"\x80\x04" + b"}C\x01a" * 9999 + b"C\x01a" + b"s" * 9999 + b"."],
}


@cases("kind", HOSTILE)
def test_hostile_file_is_refused_at_once_and_runs_nothing(kind, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for thing in HOSTILE[kind]:
        is_pickled = isinstance(thing, bytes)
        for pickled in [thing] if is_pickled else [pickle.dumps(thing, protocol) for protocol in (0, 2, 4, 5)]:
            path.write_bytes(pickled + hashlib.sha256(pickled).digest())
            began = time.monotonic()
            with bad_input(f"{path}: "):
                loaded(path)
            assert time.monotonic() - began < 1 and not (tmp_path / "hacked").exists()
    path.write_bytes(GOOD + hashlib.sha256(GOOD).digest())
    assert loaded(path).table == {(A, B): LOGPS}


def test_damaged_file_is_refused(path, whole):
    whole.save(path)
    data = path.read_bytes()
    for n in range(0, len(data), 33):
        flipped = data[:n] + bytes([data[n] ^ 4]) + data[n + 1:]
        for damaged in (data[:n], flipped):
            path.write_bytes(damaged)
            with bad_input("delete it"):
                loaded(path)


# --- The digest

def save_model(folder, change=0, size="50GB", **config):
    model = make("llama", **config)
    model.lm_head.weight.data[-1, -1] += change
    model.save_pretrained(folder, max_shard_size=size)


def test_digest_of_a_checkpoint(tmp_path):
    kinds = [{}, dict(rms_norm_eps=1e-3), dict(size="50KB"), dict(change=1), dict(change=1, size="50KB")]
    for case in kinds:
        save_model(tmp_path / str(case), **case)
    digests = {checkpoint_digest(tmp_path / str(case)) for case in kinds}
    assert len(digests) == 5
    folder = tmp_path / "{}"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"transformers_version": "', '"transformers_version": "9.'))
    assert checkpoint_digest(folder) in digests


def test_digest_of_bin_weights_and_of_a_name_of_the_hub(tmp_path, monkeypatch):
    """Without weights all checkpoints of an architecture would share caches."""
    save_model(tmp_path)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    asked = []  # the hub is asked for such weights only where it has no others
    monkeypatch.setattr(refcache, "snapshot_download", lambda _, allow_patterns: (
        asked.append(allow_patterns[1]) or tmp_path))
    assert checkpoint_digest("a/name") == checkpoint_digest(tmp_path)
    assert asked == ["model*.safetensors", "pytorch_model*.bin"]
    weights.unlink()
    with bad_input("has no weights"):
        checkpoint_digest(tmp_path)


@needs_peft
def test_digest_of_an_adapter_and_of_its_base(tmp_path):
    digests = set()
    for change, seed in ((0, 0), (0, 1), (1, 1)):
        save_model(tmp_path / "base", change)
        digests.add(checkpoint_digest(adapt("of a digest", str(tmp_path / "base"), seed)))
    assert len(digests) == 3
