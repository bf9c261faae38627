"""ReferenceCache: exact, small, shared by jobs, safe against kills and against damaged or hostile files."""
import fcntl
import functools
import hashlib
import os
import pickle
import random
import threading
import weakref
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from models import GROUPS, P, Q, bad_input, equal, flat, make, parametrize, ready, slow
from runs import adapt, needs_peft

import refcache
from refcache import ReferenceCache, checkpoint_digest

HEADER = dict(reference="abc", dtype="float32")


load_model = functools.cache(lambda: ready("llama"))  # one model for most tests


def forward_sizes(model):
    """A list that grows by the number of tokens of each forward from now on."""
    sizes = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(args[0].numel()))
    return sizes


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
    truth = flat(slow(make("llama"), GROUPS))
    keys = [(prompt, y) for prompt, completions in GROUPS for y in completions]
    assert np.abs(np.concatenate([whole[key] for key in keys]) - truth.detach().numpy()).max() < 1e-5
    assert set(whole) == set(keys)
    assert len(whole) == 8
    assert (Q + (44,), (2,)) not in whole  # the boundary is part of the key


def test_unwritable_path_is_refused_before_scoring(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/cache.pkl", "/proc/cache.pkl"):  # a lock in /proc would be waited for
        with bad_input(f"{path} cannot be written"):
            ReferenceCache(**HEADER).fill(None, GROUPS, path=path)


def test_prompt_of_several_groups_is_encoded_once_and_nothing_is_padded():
    model = ready("llama")
    sizes = forward_sizes(model)
    assert ReferenceCache().fill(lambda: model, [(P, [(7,)]), (Q, [(7,)]), (P, [(8,), (7,)]), (P, [(7,)])]) == 3
    assert sizes == [len(P) + 2 + len(Q) + 1]


@parametrize("name, budget, mean", [("llama", 24, 15), ("gemma2-softcaps", 50, 35)])
def test_tokens_per_forward_bounds_a_pass(name, budget, mean):
    model = ready(name)
    sizes = forward_sizes(model)
    ReferenceCache().fill(lambda: model, [(Q, [(i, 5, 2) for i in range(40)]), *GROUPS], budget)
    assert max(sizes) <= budget
    assert sum(sizes) / len(sizes) > mean


def test_fill_keeps_no_reference_to_the_model():
    models = []

    def load():
        model = ready("llama")
        model.itself = [model]  # only a search for garbage frees it
        models.append(weakref.ref(model))
        return model
    ReferenceCache().fill(load, GROUPS)
    assert models[0]() is None


def watched(seen, after=None):
    """Loads a model that adds the tokens of each forward to `seen`, until it is interrupted before number `after`."""
    def hook(module, args):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(args[0].tolist())
    model = ready("llama")
    model.model.embed_tokens.register_forward_pre_hook(hook)
    return lambda: model


def test_interrupted_pass_continues_where_another_job_has_scored_some(path):
    groups = [(p, [(i, j, p[0]) for j in range(6)]) for i, p in enumerate([P, Q, (4, 4), (8,) * 5])]
    truth, first, rest = [], [], []
    whole = ReferenceCache(**HEADER)
    whole.fill(load_model, [(prompt, completions[1:4]) for prompt, completions in groups], 20)
    whole.save(path)
    whole.fill(watched(truth), groups, 20)
    with pytest.raises(KeyboardInterrupt):
        ReferenceCache(**HEADER).fill(watched(first, after=3), groups, 20, path=path)
    continued = loaded(path)
    assert 12 < len(continued) < len(whole)
    continued.fill(watched(rest), groups, 20, path=path)
    assert first[:-1] + rest == truth  # the last one was begun before the one before it was kept
    assert equal(continued, whole) and equal(loaded(path), whole)


@parametrize("seconds, scored", [(1, [1, 2, 3, 4, 5]), (15, [1, 4])])
def test_a_pass_saves_every_minute_and_at_most_a_tenth_of_its_time(path, monkeypatch, seconds, scored):
    """For a kill that leaves no time to save. A forward takes 61 s here, and a save `seconds`."""
    clock = SimpleNamespace(now=0, monotonic=lambda: clock.now)
    saved = []

    def save(cache, path):
        clock.now += seconds
        saved.append(len(cache))

    def slow_entries(*inputs, real=refcache.entries_of):
        clock.now += 61
        return real(*inputs)
    monkeypatch.setattr(refcache, "time", clock)
    monkeypatch.setattr(ReferenceCache, "save", save)
    monkeypatch.setattr(refcache, "entries_of", slow_entries)
    ReferenceCache().fill(load_model, [(P, [(i,) for i in range(5)])], len(P) + 1, path)
    assert saved == [*scored, 5]  # and at the end


@parametrize("is_held", [False, True])
def test_a_lock_that_another_job_holds_is_told(path, monkeypatch, capsys, is_held):
    acquire = refcache.FileLock.acquire
    monkeypatch.setattr(refcache.FileLock, "acquire", lambda lock, timeout=None: acquire(lock, timeout and 0.05))
    other = open(f"{path}.lock", "w")
    if is_held:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.2, other.close).start()
    with refcache.lock(path):
        assert (f"waiting for {path}.lock" in capsys.readouterr().out) == is_held


def test_a_log_shows_no_inner_bars(capsys):
    for _ in refcache.progress_bar("ab", desc="outer"):
        list(refcache.progress_bar("cd", desc="inner"))
    list(refcache.progress_bar("ef", desc="next"))
    shown = capsys.readouterr().err
    assert "outer: 100%" in shown and "next: 100%" in shown and shown.count("\n") == 2 and "inner" not in shown


def test_two_jobs_share_a_file(path, whole):
    one = ReferenceCache(**HEADER)
    one.score(make("llama", seed=1), GROUPS[:2])  # other numbers, to tell the jobs apart
    first = one[Q, (44, 2)].copy()
    two = filled([(Q, [(5,), (44, 2)]), *GROUPS[2:]])
    assert not np.array_equal(two[Q, (44, 2)], first)
    for job in (one, two, one):
        job.save(path)
        assert set(loaded(path)) == set(job)
    assert set(one) == set(whole) | {(Q, (5,))}
    assert np.array_equal(loaded(path)[Q, (44, 2)], first)  # the job that saved first decides
    assert equal(two, one)  # a resumed run will read these numbers


def test_a_pass_ends_with_the_numbers_of_the_job_that_saved_first(path):
    """A resumed run will read them."""
    other = ReferenceCache(**HEADER)
    other.score(make("llama", seed=1), GROUPS)
    mine = ReferenceCache(**HEADER)

    def load_late():
        other.save(path)  # after this job has found no file
        return load_model()

    mine.fill(load_late, GROUPS, path=path)
    assert equal(mine, other) and equal(loaded(path), other)


@parametrize("name", HEADER)
def test_file_of_another_run_is_refused(path, whole, name):
    ReferenceCache(**HEADER | {name: "THEIRS"}).save(path)
    old = path.read_bytes()
    for use in (ReferenceCache(**HEADER).load, whole.save):
        with bad_input(f"{name}.*THEIRS.*{name}.*{HEADER[name]}"):
            use(path)
    assert path.read_bytes() == old


def refused(path):
    """Checks that a file is refused in one line, with nothing loaded."""
    cache = ReferenceCache(**HEADER)
    with bad_input("delete it") as error:
        cache.load(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 700 and str(path) in str(error.value)
    assert not cache.table


def forged(prompt=b"1234", logps=b"\0" * 4, pickled=None, **header):
    """A file with a true checksum."""
    pickled = pickled or pickle.dumps({prompt: {b"5678": logps}}, 4)
    header = ReferenceCache(**HEADER).header | header | dict(sha256=hashlib.sha256(pickled).hexdigest())
    return refcache.json.dumps(header).encode() + b"\n" + pickled


@parametrize("changes", [
    dict(logps=b"\0" * 8), dict(pickled=b"\x80\x04}}}s."),
    dict(prompt=b"123456"), dict(logps=b"\xff" * 4)],
    ids=["lengths differ", "a dict as a key", "half a prompt token", "NaN"])
def test_hostile_file_is_refused_in_one_line(path, changes):
    path.write_bytes(forged())
    assert len(loaded(path)) == 1  # it is refused for this change
    path.write_bytes(forged(**changes))
    refused(path)


def test_hostile_pickle_runs_nothing(tmp_path, path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/hacked",)

    for protocol, payload in product(range(6), (Trap(), {b"1234": Trap()})):
        path.write_bytes(forged(pickled=pickle.dumps(payload, protocol)))
        refused(path)
    assert not (tmp_path / "hacked").exists()


def test_damaged_file_is_refused(path, whole):
    whole.save(path)
    data = path.read_bytes()
    draw = random.Random(0)
    damaged = [b"not a pickle", *(data[:n] for n in range(0, len(data), 33))]
    for _ in range(99):
        at = draw.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1:])
    for bad in damaged:
        path.write_bytes(bad)
        refused(path)


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

    (tmp_path / "{}/training_args.bin").write_bytes(b"whatever")
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


def test_checkpoint_without_safetensors_has_no_digest(tmp_path):
    """Else all checkpoints of an architecture would use each other's caches."""
    make("llama").config.save_pretrained(tmp_path)
    with bad_input("safetensors"):
        checkpoint_digest(tmp_path)
