"""dpo.py from end to end: what it learns, what it writes, what changes nothing, and what it refuses."""
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import refcache
from dpo import Args, batch_rows, lr_factor
from refcache import BadInput, Diverged, encode, load_tokenizer

ROOT = Path(dpo.__file__).parent
MODEL = str(ROOT / "demo/model")
ROWS = [json.loads(line) for line in open(ROOT / "demo/pairs.jsonl")][:48]
TOKENIZER, CONTEXT = load_tokenizer(MODEL)
LOAD = refcache.load_model


def main(args):
    """Again and again into one folder, which a finished run would otherwise keep for itself."""
    (Path(args.out) / "finished.json").unlink(missing_ok=True)
    return dpo.main(args)


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def args(tmp_path):
    """A run of three steps."""
    return Args(model=MODEL, data=write(tmp_path / "train.jsonl", ROWS), eval_data=write(tmp_path / "eval.jsonl", ROWS[:8]),
                out=str(tmp_path / "out"), steps=3, batch_size=8, lr=1e-3, samples=2, max_new_tokens=4)


def weights(args):
    return load_file(Path(args.out) / "model.safetensors")


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_learns_the_demo(tmp_path, capsys):
    history = main(Args(out=str(tmp_path), epochs=1.0))
    assert history[0]["eval_rewards/accuracies"] == 0.5 and history[-1]["eval_rewards/accuracies"] > 0.9
    scores = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eval_score")).split()
    assert float(scores[-2]) < 0.45 and float(scores[-1]) > 0.9


def test_step_0_is_ln_2_and_says_so(args, capsys):
    history = main(args)
    assert history[1]["loss"] == pytest.approx(math.log(2), abs=1e-5) and abs(history[1]["rewards/margins"]) < 1e-5
    assert history[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5) and history[1]["rewards/accuracies"] == 0.5
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 0"))
    assert float(line.split("at most ")[1].split()[0]) < 1e-4 and "ln 2 = 0.6931" in line


def test_writes_a_model_that_loads_and_metrics_that_parse(args):
    history = main(args)
    out = Path(args.out)
    assert {f.name for f in out.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json", "args.json", "metrics.jsonl",
                                               "reference_logprobs.pkl", "chat_template.jinja", "generation_config.json"}
    assert not [f for f in out.iterdir() if f.name.startswith(".")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config._attn_implementation == "sdpa" and tokenizer.chat_template == TOKENIZER.chat_template
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert lines == history and [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
            "grad_norm", "lr", "num_tokens", "eval_loss", "eval_rewards/accuracies"} <= set(lines[3])
    assert json.loads((out / "args.json").read_text())["lr"] == 1e-3
    seconds = [json.loads(line) for line in open(out / "seconds.jsonl")]
    assert [list(line) for line in seconds] == [["step", "reference", "update"]] * 3 and all(0 < line["update"] < 60 for line in seconds)


def test_every_metric_is_explained_at_the_head_of_the_script(args):
    names = {name.removeprefix("eval_") for values in main(args) for name in values} - {"step"}
    assert not [name for name in names if name not in dpo.__doc__]


def test_lr_zero_changes_nothing(args):
    history = main(replace(args, lr=0.0))
    before = load_file(Path(MODEL) / "model.safetensors")
    assert largest_difference(weights(args), before) == 0 and history[-1]["eval_loss"] == history[0]["eval_loss"]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "aot", "aot_unpaired", "simpo"])
def test_tokens_per_forward_changes_memory_only(args, loss):
    one = main(replace(args, loss=loss, tokens_per_forward=100_000))
    first = weights(args)
    many = main(replace(args, loss=loss, tokens_per_forward=90, sft_weight=0.0))
    assert largest_difference(first, weights(args)) < 2e-5
    assert all(a[name] == pytest.approx(b[name], abs=1e-4, rel=1e-4) for a, b in zip(one, many) for name in a)


def test_gradient_checkpointing_changes_memory_only(args):
    main(args)
    plain = weights(args)
    main(replace(args, gradient_checkpointing=True))
    assert largest_difference(plain, weights(args)) < 1e-6


def test_same_seed_same_weights_bitwise_and_another_seed_others(args):
    main(args)
    first = weights(args)
    main(args)
    assert largest_difference(first, weights(args)) == 0
    main(replace(args, seed=1))
    assert largest_difference(first, weights(args)) > 0


def test_cached_run_equals_a_run_with_the_reference_beside_it(args):
    """By hand: two models in memory, one forward a sequence, the loss as in the paper."""
    history = main(args)
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    pairs = dpo.load_rows(args.data, TOKENIZER, 1024, args)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = args.lr * lr_factor(step, 3, args.warmup, args.schedule)
        loss = 0
        for i in batch_rows(step, len(pairs), 8, 0):
            def log_ratio(y):
                def logp(model):
                    ids = torch.tensor([pairs[i].prompt + y])
                    return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(pairs[i].prompt) - 1:].sum()
                with torch.no_grad(): ref = logp(reference)
                return logp(policy) - ref
            loss = loss - torch.nn.functional.logsigmoid(0.1 * (log_ratio(pairs[i].chosen) - log_ratio(pairs[i].rejected))) / 8
        assert loss.item() == pytest.approx(history[step]["loss"], abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    assert largest_difference(dict(policy.named_parameters()), {n: p for n, p in weights(args).items()}) < 1e-4


def test_a_complete_cache_never_loads_the_reference(args, monkeypatch):
    main(args)
    loaded = []
    monkeypatch.setattr(refcache, "load_model", lambda *a, real=refcache.load_model, **k: loaded.append(a) or real(*a, **k))
    main(replace(args, lr=5e-4, seed=3))  # other settings, the same reference
    assert len(loaded) == 1


def test_never_two_models_in_memory(args, monkeypatch):
    import weakref
    alive, most = weakref.WeakSet(), []
    def load(*a, real=refcache.load_model, **k):
        alive.add(model := real(*a, **k))
        most.append(len(alive))
        return model
    monkeypatch.setattr(refcache, "load_model", load)
    main(args)
    assert most == [1, 1]


def test_simpo_and_ref_none_load_no_reference(args, monkeypatch):
    for changes in (dict(loss="simpo"), dict(ref="none")):
        loaded = []
        monkeypatch.setattr(refcache, "load_model", lambda *a, real=LOAD, **k: loaded.append(a) or real(*a, **k))
        main(replace(args, **changes))
        assert len(loaded) == 1 and not (Path(args.out) / "reference_logprobs.pkl").exists()


def test_another_reference_model_is_used(args, tmp_path, capsys):
    shutil.copytree(MODEL, tmp_path / "other")
    state = load_file(tmp_path / "other/model.safetensors")
    save_file({k: v * 1.05 for k, v in state.items()}, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    history = main(replace(args, ref_model=str(tmp_path / "other")))
    assert abs(history[1]["rewards/margins"]) > 1e-4 and "step 0" not in capsys.readouterr().out
    with pytest.raises(BadInput, match="reference_logprobs.pkl was made with reference"):
        main(args)  # its cache, in the same folder, is not this run's


def test_a_complete_cache_is_read_and_not_written(args, tmp_path):
    main(args)
    shared = tmp_path / "shared.pkl"
    shutil.copy(Path(args.out) / "reference_logprobs.pkl", shared)
    before = shared.stat()
    main(replace(args, ref_cache=str(shared), out=str(tmp_path / "again")))
    assert (shared.stat().st_ino, shared.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_cache_that_lies_stops_the_run_at_step_0(args):
    main(args)
    path = Path(args.out) / "reference_logprobs.pkl"
    cache = refcache.ReferenceCache()
    cache.load(path)
    cache.header = json.loads(json.dumps(dict(cache.header, **{k: json.loads(refcache.pickle.loads(path.read_bytes())["header"])[k]
                                                               for k in ("reference", "tokenizer", "dtype")})))
    cache._logps = {key: (np.frombuffer(value, np.float32) + 0.1).tobytes() for key, value in cache._logps.items()}
    path.unlink()
    cache.save(path)
    with pytest.raises(Diverged, match="step 0"):
        main(args)


def test_nan_loss_stops_with_the_step_and_keeps_what_was_there(args):
    main(args)
    kept = weights(args)
    with pytest.raises(Diverged, match=r"step [23]: .*loss is nan"):
        main(replace(args, lr=1e30, warmup=0.0, max_grad_norm=1e30))
    assert largest_difference(kept, weights(args)) == 0
    assert [json.loads(line)["step"] for line in open(Path(args.out) / "metrics.jsonl")][:2] == [0, 1]


def test_bfloat16_trains_and_the_weights_stay_float32(args):
    history = main(replace(args, dtype="bfloat16"))
    assert history[1]["loss"] == pytest.approx(math.log(2), abs=0.02) and weights(args)["model.norm.weight"].dtype == torch.float32


def test_a_bfloat16_checkpoint_is_saved_as_one(args, tmp_path):
    AutoModelForCausalLM.from_pretrained(MODEL).bfloat16().save_pretrained(tmp_path / "half")
    TOKENIZER.save_pretrained(tmp_path / "half")
    main(replace(args, model=str(tmp_path / "half")))
    assert weights(args)["model.norm.weight"].dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(args.out).dtype == torch.bfloat16


def test_eval_every_and_held_out_rows_of_the_data(args):
    history = main(replace(args, eval_data=None, eval_size=4, eval_every=2, samples=4))
    assert ["eval_loss" in values for values in history] == [True, False, True, True]


def test_held_out_prompts_are_not_trained_on():
    rows = [SimpleNamespace(prompt=(i % 30,)) for i in range(90)]
    train, held = dpo.hold_out(rows, 128, seed=0)
    assert len(train) + len(held) == 90 and len(held) == 9
    assert not {row.prompt for row in train} & {row.prompt for row in held}


def test_tensorboard_gets_the_metrics(args, monkeypatch):
    written, purged = [], []
    writer = SimpleNamespace(add_scalar=lambda *a: written.append(a), close=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder, purge_step: purged.append(purge_step) or writer))
    calls = []
    def step(self, original=torch.optim.AdamW.step):
        calls.append(1)
        if len(calls) == 3: raise KeyboardInterrupt
        return original(self)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", step)
        main(replace(args, tensorboard=True, save_every=2))
    main(replace(args, tensorboard=True, save_every=2))
    assert {"update", "reference"} <= {name for name, _, _ in written}
    assert purged == [None, 3], "the board forgets what a killed run wrote after its checkpoint"
    assert ("loss" in {name for name, _, _ in written}) and {step for _, _, step in written} == {0, 1, 2, 3}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match="pip install tensorboard"):
        main(replace(args, tensorboard=True))


# --- data -----------------------------------------------------------------------------------------------------------


def test_the_held_out_split_differs_by_seed():
    rows = [SimpleNamespace(prompt=(i,)) for i in range(100)]
    assert dpo.hold_out(rows, 5, 0)[1] != dpo.hold_out(rows, 5, 1)[1]


def test_batches_are_a_function_of_seed_and_epoch():
    epochs = [[i for step in range(1, 11) for i in batch_rows(step, 10, 3, seed)] for seed in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    for epoch in range(3):
        assert sorted(epochs[0][10 * epoch:10 * epoch + 10]) == list(range(10))
    assert epochs[0][:10] != epochs[0][10:20]


def test_learning_rate_rises_and_falls():
    assert [lr_factor(s, 10, 0.2, "linear") for s in range(1, 11)] == pytest.approx([0.5, 1, *(x / 9 for x in range(8, 0, -1))][:10], abs=0.13)
    for schedule in ("linear", "cosine", "constant"):
        factors = [lr_factor(s, 20, 0.25, schedule) for s in range(1, 21)]
        assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and all(0 < f <= 1 for f in factors)
        assert factors[5:] == sorted(factors[5:], reverse=True) and (factors[-1] == 1) == (schedule == "constant")
    assert lr_factor(1, 1, 0.0, "cosine") == 1


def pairs_of(tmp_path, rows, **changes):
    return dpo.load_rows(write(tmp_path / "rows.jsonl", rows), TOKENIZER, changes.pop("limit", 1024), Args(**changes))


def test_chat_ends_as_the_template_ends_it_and_strings_with_eos(tmp_path):
    chat, plain = pairs_of(tmp_path, [ROWS[0], dict(prompt="The tea", chosen=" was warm.", rejected=" was bad.<|end|>")])
    text = TOKENIZER.apply_chat_template(ROWS[0]["prompt"] + ROWS[0]["chosen"], tokenize=False)
    assert TOKENIZER.decode(chat.prompt + chat.chosen) == text and text.endswith("<|end|>")
    assert TOKENIZER.decode(chat.prompt) == TOKENIZER.apply_chat_template(ROWS[0]["prompt"], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(plain.prompt + plain.chosen) == "The tea was warm.<|end|>"
    assert TOKENIZER.decode(plain.prompt + plain.rejected) == "The tea was bad.<|end|>"


def test_pairs_without_a_prompt_share_a_prefix(tmp_path):
    with_prompt = [dict(prompt="How was it? It", chosen=" was fine.", rejected=" stank."), dict(ROWS[0])]
    without = [dict(chosen="How was it? It was fine.", rejected="How was it? It stank."),
               {"chosen": ROWS[0]["prompt"] + ROWS[0]["chosen"], "rejected": ROWS[0]["prompt"] + ROWS[0]["rejected"]}]
    for a, b in zip(pairs_of(tmp_path, with_prompt), pairs_of(tmp_path, without)):
        assert (a.prompt, a.chosen, a.rejected) == (b.prompt, b.chosen, b.rejected)


def test_a_bos_token_is_added_once(tmp_path):
    from tokenizers.processors import TemplateProcessing
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.bos_token = first
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    plain, chat = encode(tokenizer, write(tmp_path / "r.jsonl", [dict(prompt="The tea", chosen=" was warm.", rejected=" was bad."), ROWS[0]]),
                         refcache.parse_pair, 1024, False)
    assert plain[0][0] == 0 and 0 not in plain[0][1:] and 0 not in plain[1][0]
    assert chat[0] == tuple(TOKENIZER.apply_chat_template(ROWS[0]["prompt"], add_generation_prompt=True, return_dict=False))


def test_a_truncated_prompt_keeps_its_bos(tmp_path):
    from tokenizers.processors import TemplateProcessing
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.bos_token = first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    path = write(tmp_path / "r.jsonl", [dict(prompt="The tea and the cake and the pie", chosen=" was warm.", rejected=" was bad.")])
    (whole, *_), = encode(tokenizer, path, refcache.parse_pair, 1024, False)
    (cut, ys, *_), = encode(tokenizer, path, refcache.parse_pair, 12, True)
    assert cut[0] == 0 and cut[1:] == whole[-len(cut) + 1:] and len(cut) + max(map(len, ys)) == 12 < len(whole) + max(map(len, ys))


def test_overlong_rows_are_dropped_or_truncated_and_counted(tmp_path, capsys):
    long = dict(ROWS[1], prompt=[{"role": "user", "content": "and so on " * 50}])
    sizes = [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs_of(tmp_path, ROWS)]
    limit = max(sizes)
    kept = pairs_of(tmp_path, ROWS + [long], limit=limit)
    assert len(kept) == len(ROWS)
    assert f"48 of 49 rows; 1 dropped: longer than {limit} tokens, first {tmp_path}/rows.jsonl line 49" in capsys.readouterr().out
    cut = pairs_of(tmp_path, ROWS + [long], limit=limit, truncate=True)
    assert "1 truncated: longer than" in capsys.readouterr().out and len(cut) == 49
    whole = pairs_of(tmp_path, [long])[0]
    assert len(cut[-1].prompt) + max(len(cut[-1].chosen), len(cut[-1].rejected)) == limit
    assert whole.prompt[-len(cut[-1].prompt):] == cut[-1].prompt and (whole.chosen, whole.rejected) == (cut[-1].chosen, cut[-1].rejected)
    with pytest.raises(BadInput, match="no row fits"):
        pairs_of(tmp_path, ROWS, limit=5)


def test_text_that_melts_at_the_boundary_is_dropped_and_counted(tmp_path, capsys):
    kept = pairs_of(tmp_path, [dict(prompt="The tea wa", chosen="s warm.", rejected="s bad."), dict(prompt="The tea", chosen=" was", rejected=" is")])
    assert len(kept) == 1 and "1 dropped because a token spans the end of the prompt" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_formats_hold_the_same(tmp_path, suffix):
    rows = [dict(prompt=f"The tea, {i}", chosen=' was "warm",\nvery.', rejected=" was bad.") for i in range(3)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, rows)).encode())  # a BOM, CRLF, an empty line
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "csv":
        import csv
        with open(path, "w", newline="") as f:
            (writer := csv.DictWriter(f, rows[0])).writeheader()
            writer.writerows(rows)
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)
    assert [p[:3] for p in dpo.load_rows(str(path), TOKENIZER, 1024, Args())] == [p[:3] for p in pairs_of(tmp_path, rows)]


def test_hub_datasets_name_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="pip install datasets"):
        dpo.load_rows("some/dataset", TOKENIZER, 99, Args())


def test_hub_datasets_are_loaded_by_name_and_split(monkeypatch):
    asked = []
    def load_dataset(name, data_files, split):
        asked.append((name, data_files, split))
        return ROWS
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(dpo.load_rows("some/dataset:test", TOKENIZER, 1024, Args())) == len(dpo.load_rows("some/dataset", TOKENIZER, 1024, Args())) == 48
    assert asked == [("some/dataset", None, "test"), ("some/dataset", None, "train")]


def test_show_data_marks_what_is_trained(args, capsys):
    assert main(replace(args, show_data=True)) == []
    out = capsys.readouterr().out
    assert ROWS[0]["prompt"][0]["content"] in out and "[<|end|>]" in out and out.count("-->") == 2


# --- samples and scores ---------------------------------------------------------------------------------------------


def answers_of(args, model=MODEL, **changes):
    policy = refcache.load_policy(replace(args, model=model, **changes), "cpu")
    prompts = [pair.prompt for pair in dpo.load_rows(args.data, TOKENIZER, 1024, args)[:40]]
    return sum(refcache.sample(policy, TOKENIZER, prompts, 1, np.random.default_rng(0), replace(args, dtype="float32", max_new_tokens=12))[0], [])


def test_checkpointing_leaves_samples_alone(args):
    assert answers_of(args) == answers_of(args, gradient_checkpointing=True)


def test_samples_come_from_the_model_whatever_its_generation_config_says(args, tmp_path):
    plain = answers_of(args)
    shutil.copytree(MODEL, tmp_path / "warped")
    warp = dict(temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=list(range(10, 400)),
                min_new_tokens=12, max_length=3, eos_token_id=3, pad_token_id=0, do_sample=True)
    (tmp_path / "warped/generation_config.json").write_text(json.dumps(warp))
    assert answers_of(args, str(tmp_path / "warped")) == plain and len(set(plain)) > 20


def test_no_prompt_is_asked_that_leaves_no_room_for_an_answer_and_it_says_so(args, capsys):
    assert main(replace(args, max_new_tokens=250))[0].keys() >= {"eval_loss"}
    assert "2 of 2 held-out prompts get no answer: --max_new_tokens 250 leaves them no room" in capsys.readouterr().out


@pytest.mark.parametrize("body, words", [
    ("return [1.0]", "1 scores for 2"), ("return None", "NoneType"), ("return [float('nan')] * 2", "returned nan"), ("raise KeyError('thing')", "KeyError"),
    ("return ['good', 'bad']", "TypeError"), ("raise SystemExit(0)", "SystemExit")])
def test_scorers_that_fail_are_named(args, tmp_path, body, words):
    (tmp_path / "score.py").write_text(f"def rate(prompts, completions, **columns):\n    {body}\n")
    with pytest.raises(BadInput, match=f"score.py:rate failed.*: .*{words}"):
        main(replace(args, score=f"{tmp_path}/score.py:rate"))


def test_scores_are_logged_and_none_is_left_out(args, tmp_path):
    (tmp_path / "score.py").write_text("def rate(prompts, completions, thing, **columns):\n    assert len(thing) == 2\n    return [None, 3.0]\nno = 5\n")
    history = main(replace(args, score=f"{tmp_path}/score.py:rate"))
    assert history[0]["eval_score"] == history[-1]["eval_score"] == 3.0
    for spec in ("no", "nothing"):
        with pytest.raises(BadInput, match="as FILE.py:FUNCTION"):
            main(replace(args, score=f"{tmp_path}/score.py:{spec}"))


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_second_run_leaves_nothing_of_the_first_beside_its_model(args, tmp_path):
    shutil.copytree(MODEL, tmp_path / "two")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    tokenizer.save_pretrained(tmp_path / "two")
    for _ in range(2):
        main(replace(args, model=str(tmp_path / "two")))
    assert list(Path(args.out).glob("additional_chat_templates/*"))
    main(args)
    assert not (Path(args.out) / "additional_chat_templates").exists() and not (Path(args.out) / ".saving").exists()
    AutoModelForCausalLM.from_pretrained(args.out)


def test_a_refused_run_leaves_the_last_one_s_files_alone(args):
    main(args)
    before = {f.name: f.read_bytes() for f in Path(args.out).iterdir()}
    for changes in (dict(dtype="bfloat16"), dict(data="nothing.jsonl"), dict(score="nothing.py:f")):
        with pytest.raises(BadInput):
            dpo.main(replace(args, **changes))
    assert {f.name: f.read_bytes() for f in Path(args.out).iterdir()} == before


def test_damaged_checkpoints_are_refused(args, tmp_path):
    for name, content in (("model.safetensors", b""), ("model.safetensors", b"\0" * 99), ("config.json", b"{"), ("model.safetensors", None)):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(MODEL, tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(content) if content is not None else (tmp_path / "bad" / name).unlink()
        with pytest.raises(BadInput, match="bad"):
            main(replace(args, model=str(tmp_path / "bad")))
    index = tmp_path / "bad/model.safetensors.index.json"
    for content in ("{", "{}", '{"weight_map": {"a": "nothing.safetensors"}}'):
        index.write_text(content)
        with pytest.raises(BadInput, match="bad"):
            refcache.checkpoint_digest(str(tmp_path / "bad"))


def test_a_reference_with_another_tokenizer_is_refused(args, tmp_path):
    shutil.copytree(MODEL, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput, match="not the policy's"):
        main(replace(args, ref_model=str(tmp_path / "other")))
    with pytest.raises(BadInput, match="--out is the folder"):
        main(replace(args, ref_model=str(tmp_path / "other"), out=str(tmp_path / "other")))


# --- bad input ------------------------------------------------------------------------------------------------------

GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize("rows, words", [
    ([GOOD, "{broken"], "line 2"),
    ([GOOD, '["a list"]'], "line 2: a row must be an object"),
    ([GOOD, {"prompt": "x", "chosen": "y"}], r"line 2: rejected must be a string .*columns: prompt, chosen"),
    ([GOOD, dict(ROWS[0], chosen=5)], "line 2: chosen must be"),
    ([GOOD, dict(ROWS[0], chosen=[{"role": "assistant"}])], "line 2: chosen must be"),
    ([GOOD, dict(prompt="", chosen="a", rejected="b")], "line 2: prompt is empty"),
    ([GOOD, dict(prompt="p", chosen="", rejected="b")], "line 2: chosen is empty"),
    ([GOOD, dict(prompt=[], chosen=ROWS[0]["chosen"], rejected=ROWS[0]["rejected"])], "line 2: prompt"),
    ([GOOD, dict(prompt="p", chosen=" same", rejected=" same")], "line 2: chosen equals rejected"),
    ([GOOD, dict(prompt="p", chosen=ROWS[0]["chosen"], rejected=" b")], "line 2: prompt and answers must be all strings or all chat"),
    ([GOOD, dict(chosen="x", rejected="y")], "line 2: no column prompt"),
    ([GOOD, dict(chosen="x", rejected="xy")], "line 2: no column prompt"),
    ([GOOD, dict(prompt="p", chosen="\ud800", rejected="b")], "line 2 cannot be rendered"),
    ([], "holds no rows"),
])
def test_bad_rows_are_refused_in_one_sentence_that_names_the_line(tmp_path, rows, words):
    with pytest.raises(BadInput, match=words) as error:
        pairs_of(tmp_path, rows)
    assert "\n" not in str(error.value) and "rows.jsonl" in str(error.value)


def test_csv_cells_beyond_the_header_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\np, a, b\np, a, b,more\n")
    with pytest.raises(BadInput, match="rows.csv line 3"):
        dpo.load_rows(str(tmp_path / "rows.csv"), TOKENIZER, 99, Args())


def test_a_template_under_which_the_prompt_is_no_prefix_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"
    with pytest.raises(BadInput, match="line 1: the chat template"):
        encode(tokenizer, write(tmp_path / "r.jsonl", ROWS), refcache.parse_pair, 1024, False)


def test_a_template_that_raises_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(BadInput, match="line 1 cannot be rendered: .*no such role"):
        encode(tokenizer, write(tmp_path / "r.jsonl", ROWS), refcache.parse_pair, 1024, False)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="line 1 cannot be rendered.*chat_template"):
        encode(tokenizer, write(tmp_path / "r.jsonl", ROWS), refcache.parse_pair, 1024, False)


def test_strings_without_an_eos_token_are_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.eos_token = None
    with pytest.raises(BadInput, match="no EOS token"):
        encode(tokenizer, write(tmp_path / "r.jsonl", [dict(prompt="a", chosen=" b", rejected=" c")]), refcache.parse_pair, 1024, False)


@pytest.mark.parametrize("changes, words", [
    (dict(data="nothing.jsonl"), "nothing.jsonl"), (dict(model="no/such-model"), "no/such-model"), (dict(ref_model="no/such-model"), "no/such-model"),
    (dict(model=None), "--model and --data"), (dict(data=None), "--model and --data"), (dict(out=MODEL), "--out is"),
    (dict(loss="ipo", label_smoothing=0.1), "no label smoothing"), (dict(label_smoothing=0.5), "less than 0.5"),
    (dict(loss="exo_pair"), "needs --label_smoothing"), (dict(loss="rpo_sq"), "chosen_reward"),
    (dict(loss="simpo", ref_cache="x.pkl"), "no reference"), (dict(loss="simpo", ref="swap"), "leave out --ref swap"), (dict(ref="none", ref_model=MODEL), "no reference"),
    (dict(simpo_gamma=1.0), "no margin"), (dict(rpo_eta=2.0), "reads no rewards"), (dict(lr=-1.0), "--lr"), (dict(warmup=1.5), "--warmup"),
    (dict(seed=-1), "--seed"), (dict(samples=-1), "--samples"), (dict(eval_size=-1), "--eval_size"), (dict(lr=math.inf), "--lr"),
    (dict(weight_decay=math.nan), "--weight_decay"), (dict(epochs=math.inf), "--epochs"), (dict(warmup=math.nan), "--warmup"), (dict(max_grad_norm=0.0), "--max_grad_norm"), (dict(beta=math.nan), "--beta"),
    (dict(sft_weight=math.nan), "--sft_weight"), (dict(ref_cache="/proc/nothing/cache.pkl"), "--ref_cache"), (dict(ref_cache="/"), "--ref_cache"),
    (dict(batch_size=0), "--batch_size"), (dict(steps=0), "--steps"), (dict(epochs=0.0), "--epochs"), (dict(beta=0.0), "--beta"),
    (dict(out="/proc/nothing"), "cannot write"), (dict(score="nothing.py:f"), "nothing.py:f")])
def test_bad_arguments_are_refused_in_one_sentence(args, changes, words):
    with pytest.raises(BadInput, match=words) as error:
        main(replace(args, **changes))
    assert "\n" not in str(error.value)


def test_rpo_uses_the_rewards_of_the_data(args, tmp_path):
    rows = [dict(row, chosen_reward=1.0, rejected_reward=0.25) for row in ROWS]
    history = main(replace(args, data=write(tmp_path / "scored.jsonl", rows), eval_data=write(tmp_path / "e.jsonl", rows[:4]), loss="rpo_sq", rpo_eta=2.0))
    assert history[1]["loss"] == pytest.approx(1.5 ** 2, abs=1e-3)


def test_lacking_weights_are_refused(args, tmp_path):
    shutil.copytree(MODEL, tmp_path / "other")
    state = load_file(tmp_path / "other/model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="model.norm.weight"):
        main(replace(args, model=str(tmp_path / "other")))


def run(*command, cwd=ROOT):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)


def test_the_command_line_exits_with_2_and_no_traceback(tmp_path):
    for flags in (["--model", MODEL, "--data", "nothing.jsonl"], ["--loss", "nonsense"], ["--unknown_flag", "1"]):
        done = run("dpo.py", "--out", str(tmp_path / "out"), *flags)
        assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()


def test_runs_copied_alone_with_refcache(tmp_path):
    for name in ("dpo.py", "refcache.py"):
        shutil.copy(ROOT / name, tmp_path)
    done = run("dpo.py", "--model", MODEL, "--data", write(tmp_path / "rows.jsonl", ROWS), "--steps", "1", "--samples", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/dpo/model.safetensors").exists()
