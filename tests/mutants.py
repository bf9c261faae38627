"""Breaks the code in small ways and lists which of them the quick tests do not notice.

    python tests/mutants.py              # all, about 15 minutes on one core
    python tests/mutants.py z 41 42      # those whose text contains "z", and numbers 41 and 42

Each mutant replaces one text, which must stand exactly once in the file (a shared block is changed in one script only;
tests that compare texts do not count). The tests that should notice run first, then the whole quick suite.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG, CACHE, SWAP, MANY = "test_logprobs", "test_cache", "test_swap", "test_processes"
DPO, LOSS, KTO, RLOO, SAMPLE = "test_dpo", "test_dpo_losses", "test_kto", "test_rloo", "test_samples"
DATA, RESUME, REF, LORA = "test_data", "test_resume", "test_references", "test_lora"

MUTANTS = [  # (file, tests that should notice, text, replacement)
    # shared prompts and their index tensors, which the CUDA kernel gets too
    ("refcache.py", LOG, "range(len(prompt), len(prompt) + len(y))",
     "range(len(prompt) + 1, len(prompt) + len(y) + 1)"),
    ("refcache.py", LOG, "sources += [before[-1], *own[:-1]]", "sources += own"),
    ("refcache.py", LOG, "keys += [*before, *own]", "keys += [*before[1:], *own]"),
    ("refcache.py", LOG, "key_ends.append(len(keys))", "key_ends.append(len(keys) - 1)"),
    ("refcache.py", LOG, "if len(keys) > len(ids) else None", "if len(keys) > len(ids) + 9 else None"),
    ("refcache.py", LOG, "window = (sliding_window - 1 if sliding_window else -1, 0)",
     "window = (sliding_window if sliding_window else -1, 0)"),
    ("refcache.py", LOG, "max(sizes_q), max(sizes_k), window_size", "max(sizes_k), max(sizes_q), window_size"),
    ("refcache.py", LOG, 'scale=kwargs.get("scaling")', "scale=None"),
    ("refcache.py", LOG, ".tril(n_before).triu(n_before - reach + 1)", ".tril(n_before)"),
    ("refcache.py", LOG, ".triu(n_before - reach + 1)", ".triu(n_before - reach)"),
    ("refcache.py", LOG, "x[:, :, 1 - n_q - reach:]", "x[:, :, 2 - n_q - reach:]"),
    ("refcache.py", LOG, "query, key = query.to(value.dtype), key.to(value.dtype)", "pass"),
    ("refcache.py", LOG, "first = row_start + len(prompt) - 1", "first = row_start + len(prompt)"),
    ("refcache.py", LOG, "shared < blind / ratio", "True"),
    ("refcache.py", LOG, "if not (shared < limit", "if not (True"),
    ("refcache.py", LOG, "factors |= {1 / factor for factor in factors}", "pass"),
    ("refcache.py", LOG, "attention_mask.stride(-1) == 0", "True"),
    ("refcache.py", LOG, "attention_mask=None if ones else attention_mask", "attention_mask=attention_mask"),
    # log-probs
    ("refcache.py", LOG, "logits / temperature if", "logits if"),
    ("refcache.py", LOG, "logits * factor if factor != 1 else logits", "logits"),
    ("refcache.py", LOG, "cap * torch.tanh(logits / cap) if cap", "torch.tanh(logits / cap) if cap"),
    ("refcache.py", LOG, "if len(hidden) * bytes_per_token > HEAD_BYTES:",
     "if len(hidden) * bytes_per_token > 4 * HEAD_BYTES:"),
    ("refcache.py", LOG, "chunk_size = max(1, budget //", "chunk_size = max(10**9, budget //"),
    ("refcache.py", LOG, "if length > context or highest", "if highest"),
    ("refcache.py", LOG, "if not prompt or not completions or not all(completions):", "if not prompt:"),
    ("refcache.py", LOG, "if load + size > budget", "if load > budget"),
    ("refcache.py", DPO, "ratios = ratios - to_device", "ratios = ratios + to_device"),
    ("refcache.py", SWAP, "ratios = ratios.clamp(*clamp)", "pass"),
    ("refcache.py", DPO, "if not difference < limit:", "if difference < -limit:"),
    # the cache
    ("refcache.py", CACHE, 'if theirs != mine and name != "name":', "if False:"),
    ("refcache.py", CACHE, 'if hashlib.sha256(pickled).hexdigest() != header["sha256"]:', "if False:"),
    ("refcache.py", CACHE, "    if others:\n        raise BadInput", "    if False:\n        raise BadInput"),
    ("refcache.py", CACHE, "                del model\n                gc", "                gc"),
    ("refcache.py", CACHE, "            if Path(path).exists():\n                self.load(path)\n            table",
     "            table"),
    ("refcache.py", CACHE, "if not flat.isfinite().all():", "if False:"),
    ("refcache.py", CACHE, "        except BaseException:\n            if path:",
     "        except BaseException:\n            if False:"),
    ("refcache.py", CACHE, 'digest.update(np.memmap(file, np.uint8, "r"))',
     "digest.update(np.memmap(file, np.uint8, 'r')[:99])"),
    # the swap
    ("refcache.py", SWAP, "        copy(self.ours, self.saved)\n        try", "        try"),
    ("refcache.py", SWAP, "tensor.lerp(new, mix)", "new.lerp(tensor, mix)"),
    ("refcache.py", SWAP, "        if differing:\n            raise", "        if False:\n            raise"),
    # several processes
    ("refcache.py", MANY, "module.set_gradient_divide_factor(1.0)", "pass"),
    ("refcache.py", MANY, "[rank::ranks]", "[rank::ranks + 1]"),
    ("refcache.py", MANY, 'register_fsdp_forward_method(core, "flat_logprobs")', "pass"),
    ("refcache.py", MANY, "for module in reversed(layers):", "for module in layers:"),
    ("refcache.py", MANY, "if len(set(all_gather(digest))) > 1:", "if False:"),
    ("dpo.py", MANY, "means = all_reduce(torch", "means = (torch"),
    ("dpo.py", MANY, "share = bool(indices) / len(rows)", "share = 1 / len(rows)"),
    ("kto.py", MANY, "mean = all_reduce(total) / max", "mean = total / max"),
    ("kto.py", MANY, ".sum() * bool(indices)", ".sum()"),
    ("kto.py", MANY, "synced_gpus=dist.is_initialized()", "synced_gpus=False"),
    ("rloo.py", MANY, "return all_reduce(ref_logps)", "return ref_logps"),
    ("rloo.py", MANY, "own = slice(len(rows) * rank // ranks, len(rows) * (rank + 1) // ranks)",
     "own = slice(0, len(rows))"),
    # losses
    ("dpo.py", LOSS, "margin = beta * (ratio_w - ratio_l)", "margin = beta * (ratio_w + ratio_l)"),
    ("dpo.py", LOSS, "return -(1 - eps) * log_sigma(margin) - eps", "return -(1 - eps) * log_sigma(margin) + eps"),
    ("dpo.py", LOSS, "- 1 / (2 * beta)) ** 2", "- 1 / beta) ** 2"),
    ("dpo.py", LOSS, "- args.simpo_gamma)", "+ args.simpo_gamma)"),
    ("dpo.py", DPO, "torch.where(is_tie, 0.5,", "torch.where(is_tie, 0.0,"),
    ("dpo.py", REF, "reference.sync(args.sync_mix)  # after", "reference.sync()  # after"),
    ("dpo.py", DPO, "        optimizer.zero_grad()\n", ""),
    ("dpo.py", DPO, "warmup_steps = round(args.warmup * steps)\n", "warmup_steps = round(args.warmup * steps) + 1\n"),
    ("kto.py", KTO, "return mean.clamp(min=0)", "return mean"),
    ("kto.py", KTO, "sign * (batch.ratio - z)", "sign * (batch.ratio + z)"),
    ("kto.py", KTO, "order[most:] + order[:most]", "order[1:] + order[:1]"),
    ("rloo.py", RLOO, "reward = reward - args.beta", "reward = reward + args.beta"),
    ("rloo.py", RLOO, "torch.where(samples.ended, rewards", "torch.where(~samples.ended, rewards"),
    ("rloo.py", RLOO, "function(**deepcopy(inputs))", "function(**inputs)"),
    ("rloo.py", RLOO, "names = {name for row in rows for name in row.columns}", "names = set(rows[0].columns)"),
    ("rloo.py", RLOO, "if len(set(names)) < len(names):", "if False:"),
    ("rloo.py", RLOO, "if args.k < 2:", "if False:"),
    ("rloo.py", RLOO, "if self.model.config.num_labels != 1:", "if False:"),
    ("rloo.py", RLOO, 'if info["missing_keys"]:', "if False:"),
    ("rloo.py", RLOO, "stops = core.generation_config.eos_token_id", "stops = None"),
    ("rloo.py", SAMPLE, "kept = TopPLogitsWarper(top_p)(None, kept)", "kept = TopPLogitsWarper(top_p)(None, logps)"),
    ("rloo.py", SAMPLE, "positions = (mask.cumsum(1) - 1).clamp(min=0)",
     "positions = torch.arange(ids.shape[1], device=device).expand_as(ids)"),
    ("rloo.py", SAMPLE, "lengths[rows].clamp(max=t + 1)", "lengths[rows].clamp(max=t)"),
    ("rloo.py", SAMPLE, "logps = logps.masked_fill(is_late, 0.0).sum(1)", "logps = logps.sum(1)"),
    # data, checkpoints
    ("dpo.py", DATA, "len(os.path.commonprefix([prompt, ids]))", "len(prompt)"),
    ("dpo.py", DATA, "bos = full[:full.index(plain[0])]", "bos = full[1:full.index(plain[0])]"),
    ("dpo.py", DATA, "ids if ids[:len(bos)] == bos else bos + ids", "bos + ids"),
    ("rloo.py", DATA, 'if prompt[-1]["role"] == "assistant" else', "if False else"),
    ("dpo.py", DATA, 'if roles & {"user", "system"}:', "if False:"),
    ("dpo.py", RESUME, "    if differing:\n        raise", "    if False:\n        raise"),
    ("dpo.py", RESUME, "os.truncate(out / name, size)", "pass"),
    ("dpo.py", RESUME, "torch.manual_seed(args.seed + step)", "pass"),
    ("dpo.py", RESUME, "range(first, min(first + window", "range(step, min(first + window"),
    ("dpo.py", RESUME, 'state["reference"] = reference', "pass"),
    ("dpo.py", DPO, "value.zero_()", "value"),
    ("dpo.py", RESUME, 'tensors[f"optimizer.{name}.{key}"] =', "_ ="),
    ("dpo.py", RESUME, "shutil.rmtree(folder, ignore_errors=True)  # of a killed save", "pass"),
    ("rloo.py", SAMPLE, "self.room[0].shape[2] == n", "self.room[0].shape[2] == n - 1"),
    ("rloo.py", SAMPLE, "        super().batch_select_indices(indices)\n        self.room = None",
     "        super().batch_select_indices(indices)"),
    ("rloo.py", SAMPLE, "        positions = positions + 1\n", ""),
    ("rloo.py", SAMPLE, "check_sampler(policy, tokenizer, args)\n    ref", "ref"),
    ("rloo.py", RLOO, 'texts.append(text.partition("\\uffff")[0])', "texts.append(text)"),
    ("refcache.py", LOG, "y = y[:len(y) // 2] if cut else y", "pass"),
    ("dpo.py", REF, "and module.weight is not embeddings", "and True"),
    ("dpo.py", DATA, "if 2 * kept < len(rows):", "if not kept:"),
    ("dpo.py", DATA, "if as_chat and isinstance(prompt, str):", "if False:"),
    ("dpo.py", RESUME, '    if (out / "model").exists():', "    if False:"),
]
EQUIVALENT = {}  # text -> why nothing can notice


def tests(folder: str, *names) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names,
               "--ignore=tests/test_scripts.py", "--ignore=tests/test_change_it.py"]  # they compare texts
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=300)
    except subprocess.TimeoutExpired:  # processes that wait for each other
        return False
    return done.returncode in (0, 5)


def main():
    chosen = sys.argv[1:]
    alive = []
    began = time.time()
    if not chosen and not tests(str(ROOT)):
        sys.exit("the quick suite fails without any fault: nothing can be learnt")
    for number, (file, names, old, new) in enumerate(MUTANTS):
        if chosen and str(number) not in chosen and not any(word in old for word in chosen if not word.isdigit()):
            continue
        text = (ROOT / file).read_text()
        if text.count(old) != 1:
            sys.exit(f"mutant {number}: {old!r} stands {text.count(old)} times in {file}")
        with tempfile.TemporaryDirectory() as folder:
            left_out = shutil.ignore_patterns(".git", "out", "__pycache__")
            shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=left_out)
            (Path(folder) / file).write_text(text.replace(old, new))
            lives = tests(folder, f"tests/{names}.py") and tests(folder)
        known = EQUIVALENT.get(old, "")
        if lives and not known:
            alive.append(number)
        print(f"{number:3} {time.time() - began:5.0f} s  {'LIVES ' + known if lives else 'killed'}  {file}: {old!r}",
              flush=True)
    print(f"{len(alive)} of {len(MUTANTS)} live without a reason: {alive}")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
