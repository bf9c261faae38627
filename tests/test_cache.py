"""ReferenceCache: exact, lean, shared by jobs, and deaf to damaged or hostile files."""
import gc
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from models import make
from test_logprobs import GROUPS, slow

import refcache
from refcache import BadInput, ReferenceCache, shared_ints

HEADER = dict(reference="abc", tokenizer="def", dtype="float32")


def filled(groups=GROUPS, **header):
    cache = ReferenceCache(**{**HEADER, **header})
    cache.fill(lambda: make("llama"), groups)
    return cache


def same(a, b):
    return set(a) == set(b) and all(np.array_equal(a[key], b[key]) for key in a)


def test_holds_the_log_probs_of_every_completion():
    cache, model = filled(), make("llama")
    for (prompt, completions), truth in zip(GROUPS, slow(model, GROUPS)):
        for y, logps in zip(completions, truth):
            assert cache[prompt, y].dtype == np.float32 and np.abs(cache[prompt, y] - logps.detach().numpy()).max() < 1e-5
    assert len(cache) == sum(len(ys) for _, ys in GROUPS)


def test_the_boundary_is_part_of_the_key():
    cache = filled([((5, 6), [(7, 8)])])
    assert ((5, 6), (7, 8)) in cache and ((5,), (6, 7, 8)) not in cache
    with pytest.raises(KeyError):
        cache[(5, 6, 7), (8,)]


def test_fill_scores_only_what_is_missing_and_loads_nothing_if_nothing_is(tmp_path, capsys):
    cache, seen = filled(GROUPS[:2]), []
    def load():
        seen.append(1)
        return make("llama")
    assert cache.fill(load, GROUPS) == 4 and cache.fill(load, GROUPS) == 0 and seen == [1]
    assert same(cache, filled())
    cache.fill(load, [((5, 6), [(1, 2)])], path=tmp_path / "cache.pkl")
    assert "tok/s" in capsys.readouterr().err


def test_a_completion_asked_for_twice_counts_once():
    cache = ReferenceCache(**HEADER)
    assert cache.fill(lambda: make("llama"), [((5, 6), [(7,), (7,)]), ((5, 6), [(7,), (8,)])]) == 2


def test_the_same_completion_is_scored_once_and_one_prompt_encoded_once(monkeypatch):
    forwards = []
    monkeypatch.setattr(refcache, "_forward", lambda *a, original=refcache._forward: forwards.append(a[1]) or original(*a))
    cache = ReferenceCache(**HEADER)
    cache.fill(lambda: make("llama"), [((5, 6), [(7,)]), ((5, 6), [(8,), (7,)]), ((5, 6), [(7,)])])
    assert [batch for batch in forwards if batch[0][0] == (5, 6)] == [[((5, 6), [(7,), (8,)])]]


@pytest.mark.parametrize("cycle", [False, True])
def test_fill_lets_go_of_the_model(cycle):
    models = []
    def load():
        model = make("llama")
        model.itself = [model] if cycle else None
        models.append(weakref.ref(model))
        return model
    gc.disable()  # no luck
    try:
        ReferenceCache(**HEADER).fill(load, GROUPS)
        assert models[0]() is None
    finally:
        gc.enable()


def test_out_of_memory_halves_the_forward_and_goes_on(monkeypatch, capsys):
    def small_device(model, groups, budget, temperature, original=refcache.completion_logprobs):
        if sum(len(p) + sum(map(len, ys)) for p, ys in groups) > 17:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, groups, budget, temperature)
    monkeypatch.setattr(refcache, "completion_logprobs", small_device)
    groups = [g for g in GROUPS if len(g[0]) < 10]
    cache = filled(groups)
    monkeypatch.undo()
    assert set(cache) == set(truth := filled(groups)) and all(np.allclose(cache[k], truth[k], atol=1e-5) for k in cache)
    assert "out of memory" in "".join(capsys.readouterr())


def test_out_of_memory_with_a_single_completion_is_an_error(monkeypatch):
    def no_device(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(refcache, "completion_logprobs", no_device)
    with pytest.raises(torch.OutOfMemoryError):
        filled()


def test_interrupted_fill_keeps_what_it_had(tmp_path, monkeypatch):
    path, calls = tmp_path / "cache.pkl", []
    def interrupted(model, groups, budget, temperature, original=refcache.completion_logprobs):
        calls.append(groups)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(model, groups, budget, temperature)
    monkeypatch.setattr(refcache, "completion_logprobs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ReferenceCache(**HEADER).fill(lambda: make("llama"), GROUPS, tokens_per_forward=30, path=path)
    monkeypatch.undo()
    cache = ReferenceCache(**HEADER)
    cache.load(path)
    assert len(cache) == sum(len(ys) for batch in calls[:2] for _, ys in batch) > 0
    cache.fill(lambda: make("llama"), GROUPS)
    assert set(cache) == set(filled())


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_killed_pass_goes_on_with_the_forwards_that_it_lacks(name):
    """The same forwards give the same bits, wherever it was killed; also where another run had scored some completions before."""
    model, rng = make(name), random.Random(0)
    prompts = [tuple(rng.choices(range(9), k=rng.randint(1, 9))) for _ in range(12)]
    keys = dict.fromkeys((rng.choice(prompts), tuple(rng.choices(range(97), k=rng.randint(1, 12)))) for _ in range(80))
    for before in ([], rng.sample(list(keys), 15)):
        cache = ReferenceCache(**HEADER)
        cache._logps.update(dict.fromkeys(before, b""))
        whole = cache._plan(model, keys, 40)
        assert len(whole) > 10 and len(keys) - len(before) == sum(len(ys) for batch in whole for _, ys in batch)
        for n, batch in enumerate(whole):
            assert cache._plan(model, keys, 40) == whole[n:]
            cache._logps.update({(p, y): b"" for p, ys in batch for y in ys})


def test_a_killed_pass_cuts_a_long_group_where_the_whole_one_did():
    """Three completions of one prompt, two of which fill a forward: the cut must not move when the first is known."""
    model, p, ys = make("llama"), (5, 6), [(i,) * 4 for i in (7, 8, 9)]
    keys, cache = dict.fromkeys((p, y) for y in ys), ReferenceCache()
    assert cache._plan(model, keys, 10) == [[(p, ys[:2])], [(p, ys[2:])]]
    cache._logps[p, ys[0]] = b""
    assert [ys for batch in cache._plan(model, keys, 10) for _, ys in batch] == [ys[1:2], ys[2:]]


def test_killed_fill_loses_at_most_what_came_after_the_last_save(tmp_path):
    """A real process, killed with -9 in the middle of the pass, with a save after every forward."""
    code = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(refcache.__file__).parent), str(Path(__file__).parent)]!r}
import refcache
from models import make
from test_logprobs import GROUPS
from test_cache import HEADER
cache, original, left = refcache.ReferenceCache(**HEADER), refcache.completion_logprobs, [3]
def counted(*a):
    left[0] -= 1
    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
    return original(*a)
refcache.completion_logprobs = counted
cache.fill(lambda: make("llama"), GROUPS, tokens_per_forward=30, path={str(tmp_path / "cache.pkl")!r}, save_every=0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    cache = ReferenceCache(**HEADER)
    cache.load(tmp_path / "cache.pkl")
    assert 0 < len(cache) < len(filled())
    assert [f.name for f in tmp_path.iterdir() if f.suffix not in (".pkl", ".lock")] == []


def test_saved_and_loaded_is_equal(tmp_path):
    cache = filled()
    cache.save(tmp_path / "cache.pkl")
    again = ReferenceCache(**HEADER)
    again.load(tmp_path / "cache.pkl")
    assert same(cache, again)
    again.save(tmp_path / "again.pkl")
    assert (tmp_path / "again.pkl").read_bytes() == (tmp_path / "cache.pkl").read_bytes()


def test_two_jobs_that_share_a_file_keep_both_their_work(tmp_path):
    one, two = filled(GROUPS[:2]), filled(GROUPS[2:])
    one.save(tmp_path / "cache.pkl")
    two.save(tmp_path / "cache.pkl")
    both = ReferenceCache(**HEADER)
    both.load(tmp_path / "cache.pkl")
    assert set(both) == set(filled()) == set(two)


@pytest.mark.parametrize("name", HEADER)
def test_a_file_of_something_else_is_refused_with_both_values(tmp_path, name):
    filled(**{name: "THEIRS"}).save(tmp_path / "cache.pkl")
    mine = ReferenceCache(**HEADER)
    with pytest.raises(BadInput, match=f"{name} THEIRS.*{name} {HEADER[name]}"):
        mine.load(tmp_path / "cache.pkl")
    assert len(mine) == 0
    with pytest.raises(BadInput):
        filled().save(tmp_path / "cache.pkl")  # nor is it overwritten


def test_at_most_14_bytes_a_token_in_memory_and_8_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(refcache, "completion_logprobs", lambda model, groups, *_: [[torch.rand(len(y)) for y in ys] for _, ys in groups])
    monkeypatch.setattr(refcache, "micro_batches", lambda model, groups, _: [[i] for i in range(len(groups))])
    rng = np.random.default_rng(0)
    groups = [(tuple(rng.integers(150_000, size=120).tolist()), [tuple(rng.integers(150_000, size=60).tolist()) for _ in "wl"])
              for _ in range(2000)]  # as many fresh ints as tokens, as tokenizers make them
    tokens = 2000 * 240
    shared_ints(range(150_000))  # the table of ints, once a process: 5 MB for 150,000 ids, whatever the number of rows
    tracemalloc.start()
    cache = ReferenceCache(**HEADER)
    cache.fill(lambda: make("llama"), groups)
    after_fill = tracemalloc.get_traced_memory()[0] / tokens
    cache.save(tmp_path / "cache.pkl")
    del cache
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    again = ReferenceCache(**HEADER)
    again.load(tmp_path / "cache.pkl")
    after_load = (tracemalloc.get_traced_memory()[0] - before) / tokens
    tracemalloc.stop()
    assert 8 < after_fill <= 14 and 8 < after_load <= 14, (after_fill, after_load)
    assert os.path.getsize(tmp_path / "cache.pkl") / tokens <= 8


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing(tmp_path):
    trap = Runs()
    trap.path = tmp_path / "hacked"
    for protocol in range(6):
        for payload in (trap, {"header": trap}, [trap]):
            (tmp_path / "cache.pkl").write_bytes(pickle.dumps(payload, protocol))
            with pytest.raises(BadInput, match="asks for"):
                ReferenceCache(**HEADER).load(tmp_path / "cache.pkl")
    assert not trap.path.exists()


@pytest.mark.parametrize("data", [
    b"", b"not a pickle", b"\x80\x04N.", pickle.dumps([1]), pickle.dumps({}), b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"x.",
    b"\x80\x04]" + b"r" + (2**31).to_bytes(4, "little") + b".", pickle.dumps(dict(checksum="", header=b"{}", tokens=2**40)),
    b"\x80\x02}q\x00." * 3, b"(" * 100_000, b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."])
def test_a_file_that_is_no_cache_is_refused_at_once(tmp_path, data):
    (tmp_path / "cache.pkl").write_bytes(data)
    with pytest.raises(BadInput, match="not a reference cache"):
        ReferenceCache(**HEADER).load(tmp_path / "cache.pkl")


def test_true_checksum_around_impossible_lengths_is_refused(tmp_path):
    filled().save(tmp_path / "cache.pkl")
    body = pickle.loads((tmp_path / "cache.pkl").read_bytes())
    for name in ("prompts", "counts", "completions", "tokens", "logps"):
        for change in (lambda b: b + b"\1\0\0\0", lambda b: b[:-4], lambda b: b"\xff\xff\xff\xff" + b[4:], lambda b: b[:-1]):
            bad = {**body, name: change(body[name])}
            del bad["checksum"]
            (tmp_path / "bad.pkl").write_bytes(pickle.dumps(dict(bad, checksum=refcache._checksum(bad)), 4))
            cache = ReferenceCache(**HEADER)
            try:
                cache.load(tmp_path / "bad.pkl")
                assert name == "logps" and len(change(body[name])) == len(body[name])  # other numbers: not to be seen
            except BadInput:
                assert len(cache) == 0


def test_truncated_and_flipped_files_are_refused_or_equal_never_wrong(tmp_path):
    truth = filled()
    truth.save(tmp_path / "cache.pkl")
    data, rng = (tmp_path / "cache.pkl").read_bytes(), random.Random(0)
    damaged = [data[:n] for n in range(0, len(data), 7)]
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    refused = 0
    for bad in damaged:
        (tmp_path / "bad.pkl").write_bytes(bad)
        cache = ReferenceCache(**HEADER)
        try:
            cache.load(tmp_path / "bad.pkl")
            assert same(cache, truth)
        except BadInput:
            refused += 1
            assert len(cache) == 0
    assert refused > 0.95 * len(damaged)


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = filled(GROUPS[:1])
    cache.save(tmp_path / "cache.pkl")
    old = (tmp_path / "cache.pkl").read_bytes()
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    cache.fill(lambda: make("llama"), GROUPS)
    with pytest.raises(OSError):
        cache.save(tmp_path / "cache.pkl")
    assert (tmp_path / "cache.pkl").read_bytes() == old and {f.suffix for f in tmp_path.iterdir()} <= {".pkl", ".lock"}


def test_digest_of_a_checkpoint_changes_with_weights_and_config_only(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "a")
    make("llama").save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "training_args.bin").write_bytes(b"whatever")
    assert refcache.checkpoint_digest(str(tmp_path / "a")) == refcache.checkpoint_digest(str(tmp_path / "b"))
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "c")
    make("llama", seed=1).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    model.config.rms_norm_eps = 1e-3
    model.save_pretrained(tmp_path / "d")
    digests = [refcache.checkpoint_digest(str(tmp_path / name)) for name in ("a", "c", "sharded", "d")]
    assert len(set(digests)) == 4 and (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    with pytest.raises(BadInput):
        refcache.checkpoint_digest(str(tmp_path / "nothing"))
