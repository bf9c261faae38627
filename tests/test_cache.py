"""ReferenceCache: exact, small, shared by jobs, safe against kills and against damaged or hostile files."""
import functools
import gc
import hashlib
import os
import pickle
import random
import signal
import struct
import threading
import time
import tracemalloc
import weakref
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from models import GPT2, build, make
from test_logprobs import GROUPS, P, Q, forward_sizes, slow

import refcache
from refcache import (
    BadInput, ReferenceCache, checkpoint_digest, one_line, share_prompts, tokenizer_digest, write_whole)

HEADER = dict(reference="abc", tokenizer="def", dtype="float32")


def new_model():
    model = make("llama")
    share_prompts(model)
    return model


load_model = functools.cache(new_model)  # one model for most tests


def filled(groups=GROUPS, path=None, tokens_per_forward=30, **header):
    cache = ReferenceCache(**{**HEADER, **header})
    cache.fill(load_model, groups, tokens_per_forward, path=path)
    return cache


def loaded(path, **header):
    cache = ReferenceCache(**{**HEADER, **header})
    cache.load(path)
    return cache


def same(a, b):
    return set(a) == set(b) and all(np.array_equal(a[key], b[key]) for key in a)


def test_fill_reads_its_file_and_refuses_another_before_any_scoring(tmp_path):
    path = tmp_path / "cache.pkl"
    filled(path=path)
    again = ReferenceCache(**HEADER)
    assert again.fill(None, GROUPS, path=path) == 0 and same(again, filled())
    with pytest.raises(BadInput, match="made with reference 'abc'"):
        ReferenceCache(**HEADER | {"reference": "other"}).fill(None, GROUPS, path=path)
    with pytest.raises(BadInput, match="cannot be written"):
        ReferenceCache(**HEADER).fill(None, GROUPS, path="/proc/nothing/cache.pkl")


def test_a_log_prob_that_is_not_finite_is_refused(tmp_path):
    cache = filled()
    prompt, scored = next(iter(cache.table.items()))
    y = next(iter(scored))
    scored[y] = np.full(len(y) // 4, np.nan, np.float32).tobytes()
    cache.save(tmp_path / "cache.pkl")
    with pytest.raises(BadInput, match="not finite"):
        loaded(tmp_path / "cache.pkl")


@pytest.fixture(scope="module")
def whole():
    return filled()


# --- what it holds, and what a fill does -----------------------------------------------------------------------------


def test_holds_the_log_probs_of_every_completion(whole):
    for (prompt, completions), truth in zip(GROUPS, slow(make("llama"), GROUPS)):
        for y, logps in zip(completions, truth):
            assert whole[prompt, y].dtype == np.float32
            assert np.abs(whole[prompt, y] - logps.detach().numpy()).max() < 1e-5
    assert set(whole) == {(prompt, y) for prompt, completions in GROUPS for y in completions}
    assert len(whole) == len(set(whole)) == 8


def test_boundary_between_prompt_and_completion_is_part_of_the_key():
    cache = filled([((5, 6), [(7, 8)])])
    assert ((5, 6), (7, 8)) in cache and ((5,), (6, 7, 8)) not in cache and ((5, 6), (7,)) not in cache
    with pytest.raises(KeyError):
        cache[(5, 6, 7), (8,)]


def test_fill_scores_only_what_is_missing_and_loads_nothing_if_nothing_is(whole):
    cache, loads = filled(GROUPS[:2]), []
    before = {key: cache[key] for key in cache}
    def load():
        loads.append(1)
        return load_model()
    assert cache.fill(load, GROUPS) == 4 and cache.fill(load, GROUPS) == 0 and loads == [1]
    assert set(cache) == set(whole) and all(np.array_equal(cache[key], before[key]) for key in before)


def test_completion_asked_for_twice_counts_once():
    cache = ReferenceCache(**HEADER)
    assert cache.fill(load_model, [((5, 6), [(7,), (7,)]), ((5, 6), [(7,), (8,)])]) == 2


def test_prompt_of_several_groups_is_encoded_once():
    model = make("llama")
    sizes = forward_sizes(model)
    ReferenceCache().score(model, [(P, [(7,)]), (Q, [(7,)]), (P, [(8,), (7,)]), (P, [(7,)])])
    assert sizes == [len(P) + 2 + len(Q) + 1]


@pytest.mark.parametrize("name", ["llama", "gemma2-softcaps"])
@pytest.mark.parametrize("budget, mean", [(24, 15), (50, 35)])
def test_no_forward_of_a_pass_is_larger_than_tokens_per_forward(name, budget, mean):
    model = make(name)
    sizes = forward_sizes(model)
    ReferenceCache().score(model, [(Q, [(i, 5, 2) for i in range(40)]), *GROUPS], tokens_per_forward=budget)
    assert max(sizes) <= budget and sum(sizes) / len(sizes) > mean, "forwards should be as full as they can be"


def test_first_pass_of_a_model_has_the_same_forwards_as_later_ones():
    """Whether prompts are shared has to be known before the groups are packed."""
    forwards = []
    for known in (False, True):
        model, sizes = make("llama"), []
        if known:
            share_prompts(model)
        model.model.embed_tokens.register_forward_hook(lambda _, args, out, sizes=sizes: sizes.append(args[0].numel()))
        ReferenceCache().score(model, GROUPS * 3, tokens_per_forward=60)
        forwards.append(sizes)
    assert forwards[0][-len(forwards[1]):] == forwards[1]


def test_score_is_without_dropout_and_leaves_training_mode_as_it_was():
    model = build("gpt2", dict(GPT2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)).train()
    one, two = ReferenceCache(), ReferenceCache()
    for cache in (one, two):
        cache.score(model, GROUPS)
    assert same(one, two) and model.training


def test_pass_of_a_model_that_gives_nan_is_refused():
    model = new_model()
    model.model.norm.weight.data.fill_(float("nan"))
    cache = ReferenceCache()
    with pytest.raises(BadInput, match="not finite"):
        cache.score(model, GROUPS)
    assert len(cache) == 0


@pytest.mark.parametrize("cycle", [False, True])
def test_fill_keeps_no_reference_to_the_model(cycle):
    models = []
    def load():
        model = new_model()
        model.itself = [model] if cycle else None
        models.append(weakref.ref(model))
        return model
    gc.disable()  # so that it is not freed by chance
    try:
        ReferenceCache(**HEADER).fill(load, GROUPS)
        assert models[0]() is None
    finally:
        gc.enable()


def test_at_most_9_bytes_per_token_in_memory_and_on_disk(tmp_path, monkeypatch):
    def random_logprobs(model, groups, *_):
        return [[torch.rand(len(y)) for y in completions] for _, completions in groups]
    monkeypatch.setattr(refcache, "completion_logprobs", random_logprobs)
    model, rng = load_model(), np.random.default_rng(0)
    def draw(length):
        return tuple(rng.integers(150_000, size=length).tolist())
    groups = [(draw(120), [draw(60), draw(60)]) for _ in range(1000)]
    tokens = 1000 * 240
    tracemalloc.start()
    cache = ReferenceCache(**HEADER)
    cache.fill(lambda: model, groups)
    after_fill = tracemalloc.get_traced_memory()[0] / tokens
    cache.save(tmp_path / "cache.pkl")
    before = tracemalloc.get_traced_memory()[0]
    again = loaded(tmp_path / "cache.pkl")
    after_load = (tracemalloc.get_traced_memory()[0] - before) / tokens
    tracemalloc.stop()
    on_disk = os.path.getsize(tmp_path / "cache.pkl") / tokens
    assert len(again) == 2000 and max(after_fill, after_load, on_disk) <= 9, (after_fill, after_load, on_disk)


# --- passes that end early -------------------------------------------------------------------------------------------


@contextmanager
def watched(seen, error=None, after=None):
    """The model, which adds the tokens of each forward to `seen`, and raises instead of forward number `after`."""
    def hook(module, args):
        if len(seen) == after:
            raise error
        seen.append(args[0].tolist())
    handle = load_model().model.embed_tokens.register_forward_pre_hook(hook)
    try:
        yield load_model()
    finally:
        handle.remove()


@pytest.mark.parametrize("error, after", [(KeyboardInterrupt(), 1), (torch.OutOfMemoryError("out of memory"), 3)])
def test_pass_that_ends_early_keeps_its_results_and_continues_with_the_same_forwards(tmp_path, error, after):
    path, groups, truth = tmp_path / "cache.pkl", GROUPS * 2 + [(Q, [(i,) for i in range(30)])], []
    whole, first, rest = ReferenceCache(**HEADER), [], []
    with watched(truth) as model:
        whole.fill(lambda: model, groups, 30)
    with watched(first, error, after) as model, pytest.raises(type(error)):
        ReferenceCache(**HEADER).fill(lambda: model, groups, 30, path=path)
    continued = loaded(path)
    assert 0 < len(continued) < len(whole)
    with watched(rest) as model:
        continued.fill(lambda: model, groups, 30, path=path)
    assert first + rest == truth and len(first) == after and same(continued, whole) and same(loaded(path), whole)


@pytest.mark.parametrize("known", [1, 3])
def test_continued_pass_has_the_same_forwards_when_another_job_knew_some_completions(known):
    rng, truth, rest = random.Random(known), [], []
    groups = [(p, [(i, j, p[0]) for j in range(6)]) for i, p in enumerate([P, Q, (4, 4), (8,) * 5])]
    whole, continued = ReferenceCache(), ReferenceCache()
    whole.score(load_model(), [(p, rng.sample(ys, known)) for p, ys in groups], 20)
    continued.table = deepcopy(whole.table)
    with watched(truth) as model:
        whole.score(model, groups, 20)
    with watched(rest, KeyError(), 2) as model, pytest.raises(KeyError):
        continued.score(model, groups, 20)
    with watched(rest) as model:
        continued.score(model, groups, 20)
    assert rest == truth and len(truth) >= 4 and same(continued, whole)


def test_pass_after_kill_is_bitwise_equal(tmp_path, whole):
    """kill -9 in the middle of the pass, in a process of its own; what was saved by then is kept."""
    path, forwards = tmp_path / "cache.pkl", []
    child = os.fork()
    if not child:
        try:
            refcache.time = SimpleNamespace(monotonic=count(0, 61).__next__)  # a minute has passed after each forward
            def hook(*_):
                forwards.append(1)
                if len(forwards) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            load_model().model.embed_tokens.register_forward_hook(hook)
            ReferenceCache(**HEADER).fill(load_model, GROUPS, 30, path=path)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    killed = loaded(path)
    assert 0 < len(killed) < len(whole)
    killed.fill(load_model, GROUPS, 30, path=path)
    assert same(killed, whole) and {file.suffix for file in tmp_path.iterdir()} <= {".pkl", ".lock"}


@pytest.mark.parametrize("seconds, fewest, most", [(0, 9, 11), (2, 9, 11), (30, 2, 4)])
def test_long_pass_saves_once_a_minute_or_as_often_as_costs_a_twentieth(tmp_path, monkeypatch, seconds, fewest, most):
    now, saves, score = [0], [], refcache.completion_logprobs
    def forward(*inputs):
        now[0] += 20
        return score(*inputs)
    def save(self, path):
        now[0] += seconds
        saves.append(len(self))
    monkeypatch.setattr(refcache, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(refcache, "completion_logprobs", forward)
    monkeypatch.setattr(ReferenceCache, "save", save)
    ReferenceCache().score(load_model(), [((i,), [(5,)]) for i in range(36)], 1, path=tmp_path / "cache.pkl")
    assert saves[-1] == 36 and fewest <= len(saves) <= most, saves


# --- files -----------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_bitwise_equal(tmp_path, whole):
    whole.save(tmp_path / "one.pkl")
    again = loaded(tmp_path / "one.pkl")
    assert same(again, whole) and again.header == whole.header
    again.save(tmp_path / "two.pkl")
    assert (tmp_path / "one.pkl").read_bytes() == (tmp_path / "two.pkl").read_bytes()


@pytest.mark.parametrize("header", [
    dict(dtype="float32", ref_dtype="float32"), dict(data="x" * 300), dict(name="name"), dict(n="2"), dict(name="ä\n")])
def test_header_of_any_strings_comes_back(tmp_path, header):
    ReferenceCache(**header).save(tmp_path / "cache.pkl")
    ReferenceCache(**header).load(tmp_path / "cache.pkl")


def test_two_jobs_that_share_a_file_keep_the_results_of_both(tmp_path, whole):
    one, two = ReferenceCache(**HEADER), filled([(Q, [(5,), (44, 2)]), *GROUPS[2:]])
    one.score(load_model(), [GROUPS[0], (Q, [(44, 2)])], temperature=0.5)  # other numbers, to tell the jobs apart
    mine = two[Q, (44, 2)].copy()
    assert not np.array_equal(one[Q, (44, 2)], mine)
    one.save(tmp_path / "cache.pkl")
    two.save(tmp_path / "cache.pkl")
    assert set(loaded(tmp_path / "cache.pkl")) == set(two) == set(whole) | {(Q, (5,))}
    assert np.array_equal(two[Q, (44, 2)], mine), "what is known already does not change"


def test_save_waits_for_the_lock_of_another_job(tmp_path, whole):
    path, job = tmp_path / "cache.pkl", threading.Thread(target=whole.save, args=[tmp_path / "cache.pkl"])
    with FileLock(f"{path}.lock"):
        job.start()
        job.join(0.3)
        assert job.is_alive() and not path.exists()
    job.join(10)
    assert same(loaded(path), whole)


@pytest.mark.parametrize("name", HEADER)
def test_file_of_another_run_is_refused_with_both_values_and_not_overwritten(tmp_path, whole, name):
    theirs, path = ReferenceCache(**{**HEADER, name: "THEIRS"}), tmp_path / "cache.pkl"
    theirs.save(path)
    old = path.read_bytes()
    for use in (ReferenceCache(**HEADER).load, whole.save):
        with pytest.raises(BadInput, match=f"{name} 'THEIRS', but this run has {name} '{HEADER[name]}'.*delete it"):
            use(path)
    assert path.read_bytes() == old


@pytest.mark.parametrize("theirs, mine", [("a" * 32, "b" * 32), ("c" * 40 + "d" * 40 + "e", "c" * 40 + "d" * 40)])
def test_values_that_differ_anywhere_are_refused_and_shown(tmp_path, theirs, mine):
    ReferenceCache(reference=theirs).save(tmp_path / "cache.pkl")
    with pytest.raises(BadInput, match=f"{theirs[:40]}.*{mine[:40]}"):
        ReferenceCache(reference=mine).load(tmp_path / "cache.pkl")


def test_file_that_lacks_a_name_of_the_header_is_refused(tmp_path):
    ReferenceCache(reference="abc").save(tmp_path / "cache.pkl")
    with pytest.raises(BadInput, match="dtype"):
        ReferenceCache(reference="abc", dtype="float32").load(tmp_path / "cache.pkl")


def test_linked_cache_is_updated_at_its_target(tmp_path, whole):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere/cache.pkl", tmp_path / "link.pkl"
    link.symlink_to(target)
    for cache in (filled(GROUPS[:1]), whole):  # a new file, then an old one
        cache.save(link)
        assert link.is_symlink() and not target.is_symlink() and same(loaded(target), cache)


def test_planted_link_at_the_partial_file_is_not_followed(tmp_path, whole):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".cache.pkl.partial").symlink_to(victim)
    whole.save(tmp_path / "cache.pkl")
    assert victim.read_text() == "precious" and same(loaded(tmp_path / "cache.pkl"), whole)
    assert not (tmp_path / "cache.pkl").is_symlink()


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failing_write_leaves_the_old_file(tmp_path, monkeypatch, whole, broken):
    path = tmp_path / "cache.pkl"
    filled(GROUPS[:1]).save(path)
    old = path.read_bytes()
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError):
        whole.save(path)
    assert path.read_bytes() == old and {file.suffix for file in tmp_path.iterdir()} <= {".pkl", ".lock"}


def test_write_whole_ends_with_the_old_or_the_new_file_and_flushes_before_it_renames(tmp_path, monkeypatch):
    path, events = tmp_path / "file", []
    path.write_bytes(b"old")
    def fsync(handle, original=os.fsync):
        events.append((path.read_bytes(), os.fstat(handle).st_size))
        original(handle)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyError):
        write_whole(path, lambda file: {}[file.write(b"half")])
    assert path.read_bytes() == b"old" and [file.name for file in tmp_path.iterdir()] == ["file"]
    write_whole(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and events[0] == (b"old", 3), "all of it is on disk before it has the name"


# --- damaged and hostile files ---------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def refused(path, **header):
    """The message with which a file is refused: one line, soon, with nothing loaded."""
    cache, began = ReferenceCache(**{**HEADER, **header}), time.monotonic()
    with pytest.raises(BadInput) as error:
        cache.load(path)
    message = str(error.value)
    assert message.isprintable() and len(message) < 500 and str(path) in message and "delete it" in message
    assert len(cache) == 0 and not cache.table and time.monotonic() - began < 2
    return message


def forged(folder, table: bytes, **header):
    """A file with a true checksum: the sum guards against damage, not against a forger."""
    empty = pickle.dumps({}, 4)
    ReferenceCache(**{**HEADER, **header}).save(folder / "forged.pkl")
    data = (folder / "forged.pkl").read_bytes()
    assert data.endswith(empty)
    sums = (hashlib.sha256(x).hexdigest().encode() for x in (empty, table))
    return data.removesuffix(empty).replace(*sums) + table


def text(string):
    return b"\x8c" + bytes([len(string)]) + string.encode()


NESTED = b"})" + b"2\x86" * 60 + b"K\x01s"  # hashing 60 nested pairs takes 2^60 steps
DEEP = b"}" + (text("a") + b"}") * 100_000 + b"s" * 100_000
NAMES = b"\x80\x04}" + b"".join(text(name) + text(value) + b"s" for name, value in (("format", "2"), *HEADER.items()))
GARBAGE = {
    "empty": b"", "text": b"not a pickle", "none": b"\x80\x04N.", "list": pickle.dumps([1], 4),
    "string": pickle.dumps("x", 4), "int": pickle.dumps(1, 4), "bytes": pickle.dumps(b"x", 4),
    "no names": pickle.dumps({}, 4), "old protocol": pickle.dumps({}, 0), "only a header": NAMES + b".",
    "JSON null": b"null\n", "JSON list": b'["format", 2]\n', "JSON string": b'"format"\n',
    "JSON object": b'{"format": "2"}\n', "JSON digits": b"9" * 100_000 + b"\n",
    "nested JSON": b"[" * 100_000 + b"]" * 100_000 + b"\n", "nested header": b"\x80\x04" + DEEP + b".",
    "nested header value": b"\x80\x04}" + text("reference") + DEEP + b"s.",
    "nested tuples": b"\x80\x04" + NESTED + b".", "nested tuples in a header": NAMES + text("extra") + NESTED + b"s.",
    "nested lists": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "marks": b"(" * 100_000,
    "dicts": b"}" * 100_000 + b".", "dict as a key": b"\x80\x04}}}s.",
    "bytearray of 3 GiB": b"\x80\x05\x96" + struct.pack("<Q", 3 * 2**30) + b"x.",
    "bytes of 1 TiB": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "bytes of 4 GiB": b"\x80\x04B" + b"\xff" * 4 + b"x.", "string of 4 GiB": b"\x80\x04X" + b"\xff" * 4 + b"x.",
    "frame of 1 TiB": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    "memo of 2^31": b"\x80\x04}r" + struct.pack("<I", 2**31) + b".", "memo of 2^32": b"\x80\x04}r" + b"\xff" * 4 + b".",
    "int of 2 GiB": b"\x80\x04\x8b" + struct.pack("<I", 2**31 - 1) + b"x.", "digits": b"I" + b"9" * 100_000 + b"\n.",
    "persistent id": b"Pos\n.", "global": b"cos\nsystem\n(S'true'\ntR.", "extension": b"\x80\x04\x82\x01."}
HEADERS = {"list": ["abc"], "null": None, "number": 2, "dict": {}, "huge": "x" * 5_000_000,
           "control characters": "\x1b[2J\r\n\x07\u202e"}
GOOD = {b"1234": {b"5678": b"\0\0\0\0"}}
TABLES = {
    "string": "x", "bytes": b"x", "list": [], "none": None, "bytes instead of a dict": {b"1234": b"5678"},
    "lengths differ": {b"1234": {b"5678": b"\0" * 8}}, "log-probs are a string": {b"1234": {b"5678": "\0\0\0\0"}},
    "log-probs are a dict": {b"1234": {b"5678": dict.fromkeys("abcd", b"")}},
    "prompt is a string": {"1234": {b"5678": b"\0" * 4}},
    "completion is a string": {b"1234": {"5678": b"\0" * 4}}, "prompt is a tuple": {(1, 2): {b"5678": b"\0" * 4}},
    "half a token": {b"1234": {b"567890": b"\0" * 6}}, "half a prompt token": {b"123456": {b"5678": b"\0" * 4}}}
RAW_TABLES = {"nested tuples": b"\x80\x04" + NESTED + b".", "nested dicts": b"\x80\x04" + DEEP + b".", "empty": b""}


def test_an_error_is_one_short_line_without_escape_codes():
    assert one_line(ValueError("\x1b[31mred\n\u202e ä\x00" + "x" * 999)) == "ValueError ?[31mred ? ä?" + "x" * 187


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_file_that_is_no_cache_is_refused_in_one_line(tmp_path, data):
    (tmp_path / "cache.pkl").write_bytes(data)
    refused(tmp_path / "cache.pkl")


@pytest.mark.parametrize("value", HEADERS.values(), ids=HEADERS)
def test_header_of_another_type_or_size_is_refused_in_one_line(tmp_path, value):
    (tmp_path / "cache.pkl").write_bytes(forged(tmp_path, pickle.dumps(GOOD, 4), reference=value))
    refused(tmp_path / "cache.pkl")


TABLES = {name: pickle.dumps(table, 4) for name, table in TABLES.items()} | RAW_TABLES


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_table_of_another_type_or_size_is_refused_in_one_line(tmp_path, table):
    (tmp_path / "cache.pkl").write_bytes(forged(tmp_path, table))
    refused(tmp_path / "cache.pkl")


def test_forged_file_with_a_good_table_is_accepted(tmp_path):
    """So that the cases above are refused for the reason that they name."""
    (tmp_path / "cache.pkl").write_bytes(forged(tmp_path, pickle.dumps(GOOD, 4)))
    assert len(loaded(tmp_path / "cache.pkl")) == 1


@pytest.mark.parametrize("protocol", range(6))
def test_hostile_pickle_runs_nothing(tmp_path, protocol):
    trap = Runs()
    trap.path = tmp_path / "hacked"
    payloads = [pickle.dumps(payload, protocol) for payload in (trap, {"format": trap}, [trap])]
    for data in (*payloads, forged(tmp_path, payloads[0]), forged(tmp_path, payloads[1])):
        (tmp_path / "cache.pkl").write_bytes(data)
        refused(tmp_path / "cache.pkl")
    assert not trap.path.exists()


def test_path_that_is_no_regular_file_is_refused_without_waiting(tmp_path, whole):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "fifo", tmp_path / "folder", tmp_path / "loop", tmp_path / "nothing", "/dev/zero"):
        refused(path)
    for path in (tmp_path / "fifo", tmp_path / "folder"):
        with pytest.raises(BadInput, match="no regular file"):
            whole.save(path)


@pytest.mark.parametrize("flips", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_truncated_or_flipped_file_is_refused_or_equal(tmp_path, whole, flips):
    whole.save(tmp_path / "cache.pkl")
    data, rng = (tmp_path / "cache.pkl").read_bytes(), random.Random(0)
    damaged = [data[:n] for n in range(0, len(data), 11)]
    for _ in range(flips):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    refusals = 0
    for bad in damaged:
        (tmp_path / "bad.pkl").write_bytes(bad)
        try:
            assert same(loaded(tmp_path / "bad.pkl"), whole)
        except BadInput:
            refusals += 1
    assert refusals > 0.95 * len(damaged)


# --- digests ---------------------------------------------------------------------------------------------------------


def test_digest_of_a_checkpoint_depends_on_weights_and_config_only(tmp_path):
    for name in ("a", "b"):
        make("llama").save_pretrained(tmp_path / name)
    (tmp_path / "b/training_args.bin").write_bytes(b"whatever")
    config = (tmp_path / "b/config.json").read_text()
    (tmp_path / "b/config.json").write_text(config.replace('"transformers_version": "', '"transformers_version": "9.'))
    assert checkpoint_digest(tmp_path / "a") == checkpoint_digest(tmp_path / "b")
    model = make("llama")
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "weights")
    make("llama", rms_norm_eps=1e-3).save_pretrained(tmp_path / "config")
    make("llama").save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    one = make("llama")
    one.lm_head.weight.data[-1, -1] += 1
    one.save_pretrained(tmp_path / "shard", max_shard_size="50KB")
    digests = [checkpoint_digest(tmp_path / name) for name in ("a", "weights", "config", "sharded", "shard")]
    assert len(set(digests)) == 5 and all(len(digest) == 32 for digest in digests)


def test_digest_of_an_adapter_depends_on_its_weights_and_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
        peft.get_peft_model(make("llama"), config).save_pretrained(tmp_path / f"{seed}")
    digests = [checkpoint_digest(tmp_path / folder, base) for folder in "01" for base in ("base one", "base two")]
    assert len(set(digests)) == 4


def test_checkpoint_without_safetensors_has_no_digest(tmp_path):
    """Else all checkpoints of an architecture would have the same digest, and use each other's caches."""
    model = make("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((BadInput, FileNotFoundError)):
        checkpoint_digest(tmp_path)


def test_digest_of_a_tokenizer_depends_on_its_vocabulary_only():
    one, two, three = (SimpleNamespace(get_vocab=lambda vocabulary=vocabulary: vocabulary)
                       for vocabulary in (dict(a=0, b=1), dict(b=1, a=0), dict(a=1, b=0)))
    assert tokenizer_digest(one) == tokenizer_digest(two) != tokenizer_digest(three)
