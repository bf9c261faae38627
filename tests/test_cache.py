"""ReferenceCache: exact, small, shared by jobs, safe against kills and against damaged or hostile files."""
import functools
import gc
import hashlib
import os
import pickle
import random
import weakref
from itertools import product

import numpy as np
import pytest
import torch
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
    with pytest.raises(OSError):
        ReferenceCache(**HEADER).fill(None, GROUPS, path=tmp_path / "file/cache.pkl")


def test_only_the_first_process_writes_the_file(path, monkeypatch):
    monkeypatch.setattr(refcache, "is_first_process", lambda: False)
    assert len(filled(path=path)) == 8 and not path.exists()


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


def test_fill_frees_the_model_and_then_the_memory_of_the_gpu(monkeypatch):
    models = []  # weak references
    was_alive = []  # at each call of empty_cache

    def load(hook=None):
        model = ready("llama")
        model.itself = [model]  # only a search for garbage frees it
        if hook:
            model.model.register_forward_pre_hook(hook)
        models.append(weakref.ref(model))
        return model

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: was_alive.append(models[-1]() is not None))
    cache = ReferenceCache()
    for _ in range(2):  # when it is full, nothing is loaded
        cache.fill(load, GROUPS)
    assert was_alive == [False] and len(models) == 1
    with pytest.raises(KeyboardInterrupt):
        ReferenceCache().fill(lambda: load(interrupt), GROUPS)
    gc.collect()  # the traceback held the model until here
    assert len(was_alive) == 2 and models[1]() is None


def test_answers_of_a_prompt_keep_their_order():
    """The policy's forward has the same row then, and rounds alike: step 1 is ln 2 in bfloat16, too."""
    rows = []
    ReferenceCache().fill(watched(rows), [(P, [(60, 2), (12, 4, 55, 2)])])
    assert rows == [[[*P, 60, 2, 12, 4, 55, 2]]]


def watched(seen, after=None):
    """Loads a model that adds the tokens of each forward to `seen`, until it is interrupted before number `after`."""
    def hook(module, args):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(args[0].tolist())
    model = ready("llama")
    model.model.embed_tokens.register_forward_pre_hook(hook)
    return lambda: model


def test_interrupted_pass_continues_where_another_job_has_scored_some(path, monkeypatch):
    monkeypatch.setattr(refcache, "SAVE_EVERY", 1)
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
    lengths = [len(ids[0]) for ids in truth]
    assert lengths == sorted(lengths, reverse=True), "so a pass that needs too much memory fails at once"
    continued.fill(watched(rest), groups, 20, path=path)
    assert first + rest == truth
    assert equal(continued, whole) and equal(loaded(path), whole)


def test_a_cache_without_a_header_takes_no_file(path, whole):
    whole.save(path)
    with bad_input("may be of any model"):
        ReferenceCache().load(path)
    with bad_input("may be of any model"):
        ReferenceCache().fill(load_model, GROUPS, path=path)


def test_a_missing_key_says_which_prompt_to_fill():
    with pytest.raises(KeyError, match=r"call fill first.*\[7\] after \[5, 6\]"):
        ReferenceCache()[(5, 6), (7,)]


def test_lists_are_filled_as_tuples(whole):
    cache = ReferenceCache()
    cache.fill(load_model, [(list(prompt), [list(y) for y in completions]) for prompt, completions in GROUPS], 30)
    assert equal(cache, whole)


def test_dropout_is_off(whole):
    cache = ReferenceCache()
    cache.compute(make("llama", attention_dropout=0.5).train(), GROUPS, 30)
    assert equal(cache, whole)


def test_two_jobs_share_a_file(path, whole):
    one = ReferenceCache(**HEADER)
    one.compute(make("llama", seed=1), GROUPS[:2])  # other numbers, to tell the jobs apart
    first = one[Q, (44, 2)].copy()
    two = filled([(Q, [(5,), (44, 2)]), *GROUPS[2:]])
    assert not np.array_equal(two[Q, (44, 2)], first)
    for job in (one, two, one):
        job.save(path)
        assert set(loaded(path)) == set(job)
    assert set(one) == set(whole) | {(Q, (5,))}
    assert np.array_equal(loaded(path)[Q, (44, 2)], first)  # the job that saved first decides
    assert equal(two, one)  # a resumed run will read these numbers


def test_a_link_to_a_file_stays_a_link(path, whole):
    target = path.with_name("target.pkl")
    path.symlink_to(target)
    whole.save(path)
    assert path.is_symlink() and equal(loaded(target), whole)


@parametrize("name", HEADER)
def test_file_of_another_run_is_refused(path, whole, name):
    ReferenceCache(**HEADER | {name: "THEIRS"}).save(path)
    old = path.read_bytes()
    for use in (ReferenceCache(**HEADER).load, whole.save):
        with bad_input(f"{name} 'THEIRS', not '{HEADER[name]}'"):
            use(path)
    assert path.read_bytes() == old


def refused(path):
    """Checks that a file is refused in one line, with nothing loaded."""
    cache = ReferenceCache(**HEADER)
    with bad_input("delete it") as error:
        cache.load(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 700 and str(path) in str(error.value)
    assert not cache.table


def forged(pickled):
    """A file with a true checksum."""
    header = ReferenceCache(**HEADER).header | dict(sha256=hashlib.sha256(pickled).hexdigest())
    return refcache.json.dumps(header).encode() + b"\n" + pickled


def test_hostile_pickle_runs_nothing(tmp_path, path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/hacked",)

    path.write_bytes(forged(pickle.dumps({(b"1234", b"5678"): b"\0" * 4}, 4)))
    assert len(loaded(path)) == 1
    for protocol, payload in product(range(6), (Trap(), {(b"1234", b"5678"): Trap()})):
        path.write_bytes(forged(pickle.dumps(payload, protocol)))
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


def test_checkpoint_without_weights_has_no_digest(tmp_path):
    """Else all checkpoints of an architecture would share caches."""
    make("llama").config.save_pretrained(tmp_path)
    with bad_input(f"{tmp_path} holds no model.*safetensors"):
        checkpoint_digest(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c\n")
    with bad_input(f"{file} is not a whole safetensors file: download it again"):
        checkpoint_digest(tmp_path)
