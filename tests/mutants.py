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
    ("refcache.py", LOG, "enumerate(y, len(prompt))", "enumerate(y, len(prompt) + 1)"),
    ("refcache.py", LOG, "scored += zip([before[-1], *own], y)", "scored += zip(own, y)"),
    ("refcache.py", LOG, "keys += [*before, *own]", "keys += [*before[1:], *own]"),
    ("refcache.py", LOG, "ends.append((len(row), len(keys)))", "ends.append((len(row), len(keys) - 1))"),
    ("refcache.py", LOG, "if len(keys) > len(row) else None", "if len(keys) > len(row) + 9 else None"),
    ("refcache.py", LOG, "window = (sliding_window - 1 if sliding_window else -1, 0)",
     "window = (sliding_window if sliding_window else -1, 0)"),
    ("refcache.py", LOG, "max(sizes_q), max(sizes_k), window_size", "max(sizes_k), max(sizes_q), window_size"),
    ("refcache.py", LOG, 'scale=kwargs.get("scaling")', "scale=None"),
    ("refcache.py", LOG, ".tril(n).triu(n - reach + 1)", ".tril(n)"),
    ("refcache.py", LOG, ".tril(n).triu(n - reach + 1)", ".tril(n).triu(n - reach)"),
    ("refcache.py", LOG, "x[:, :, 1 - n_q - reach:]", "x[:, :, 2 - n_q - reach:]"),
    ("refcache.py", LOG, "query, key = query.to(value.dtype), key.to(value.dtype)", "pass"),
    ("refcache.py", LOG, "for place, token in enumerate(y, len(prompt) - 1)]",
     "for place, token in enumerate(y, len(prompt))]"),
    ("refcache.py", LOG, "attention_mask=(ids >= 0).long()), sources", "attention_mask=(ids >= -1).long()), sources"),
    ("refcache.py", LOG, "shared < blind / ratio", "True"),
    ("refcache.py", LOG, "if not (shared < limit", "if not (True"),
    ("refcache.py", LOG, "if core._is_stateful or not layers", "if not layers"),
    ("refcache.py", LOG, 'if getattr(config, "attn_logit_softcapping", None):', "if False:"),
    ("refcache.py", LOG, "factors |= {1 / factor for factor in factors}", "pass"),
    # log-probs
    ("refcache.py", LOG, "logits / temperature if", "logits if"),
    ("refcache.py", LOG, "logits * factor if factor != 1 else logits", "logits"),
    ("refcache.py", LOG, "if len(hidden) * size > HEAD_BYTES:", "if len(hidden) * size > 4 * HEAD_BYTES:"),
    ("refcache.py", LOG, "cap * torch.tanh(logits / cap) if cap", "torch.tanh(logits / cap) if cap"),
    ("refcache.py", LOG, "hidden = hidden.index_select(0, sources)",
     "hidden = hidden.index_select(0, sources + 0 * targets)"
     ".detach()"),
    ("refcache.py", LOG, "rows = max(1, HEAD_BYTES //", "rows = max(10**9, HEAD_BYTES //"),
    ("refcache.py", LOG, "if length > context or highest", "if highest"),
    ("refcache.py", LOG, "if not prompt or not completions or not all(completions):", "if not prompt:"),
    ("refcache.py", LOG, "if load + (rows[i] * longest if rows else lengths[i]) > budget", "if load > budget"),
    ("refcache.py", DPO, "ratios = ratios - to_device", "ratios = ratios + to_device"),
    ("refcache.py", DPO, "ratios.clamp(*clamp) if clamp", "ratios if clamp"),
    ("refcache.py", DPO, "if not ratios.abs().mean() < (", "if ratios.abs().mean() < -("),
    # the cache
    ("refcache.py", CACHE, "if header.get(name) != mine:", "if False:"),
    ("refcache.py", CACHE, 'if hashlib.sha256(pickled).hexdigest() != header["sha256"]:', "if False:"),
    ("refcache.py", CACHE, "    if others:\n        raise BadInput", "    if False:\n        raise BadInput"),
    ("refcache.py", CACHE, "                del model\n                gc", "                gc"),
    ("refcache.py", CACHE, "            if Path(path).exists():\n                self.load(path)\n            table",
     "            table"),
    ("refcache.py", CACHE, "if not flat.isfinite().all():", "if False:"),
    ("refcache.py", CACHE, "        except BaseException:\n            if path:",
     "        except BaseException:\n            if False:"),
    ("refcache.py", CACHE, "            os.fsync(file.fileno())\n", ""),
    ("refcache.py", CACHE, 'digest.update(np.memmap(file, np.uint8, "r"))',
     "digest.update(np.memmap(file, np.uint8, 'r')[:99])"),
    ("refcache.py", CACHE, "sorted(tokenizer.get_vocab().items())", "sorted(tokenizer.get_vocab())"),
    # the swap
    ("refcache.py", SWAP, "if any(all_gather(not frozen or", "if any(all_gather(frozen or"),
    ("refcache.py", SWAP, "        copy(self.ours, self.saved)\n        try", "        try"),
    ("refcache.py", SWAP, "tensor.lerp(new, mix)", "new.lerp(tensor, mix)"),
    ("refcache.py", SWAP, "if differing := [name", "if differing := [][:0] and [name"),
    # several processes
    ("refcache.py", MANY, "module.set_gradient_divide_factor(1.0)", "pass"),
    ("refcache.py", MANY, "[rank::ranks]", "[rank::ranks + 1]"),
    ("refcache.py", MANY, 'register_fsdp_forward_method(core, "flat_logprobs")', "pass"),
    ("refcache.py", MANY, "for module in reversed(layers):", "for module in layers:"),
    ("refcache.py", MANY, "if len(set(all_gather(mine))) > 1:", "if False:"),
    ("dpo.py", MANY, "all_reduce(values), parts", "values, parts"),
    ("dpo.py", MANY, "(loss * bool(micro)).backward()", "loss.backward()"),
    ("kto.py", MANY, "(all_reduce(total) / max(1, len(others)))", "(total / len(others))"),
    ("rloo.py", MANY, "        all_reduce(values)  # zeros where another", "        pass  # zeros where another"),
    ("rloo.py", MANY, "any(all_gather(unfinished)) if in_step else unfinished", "unfinished"),
    # losses
    ("dpo.py", LOSS, "margin = beta * (f_prime(ratio_w) - f_prime(ratio_l))",
     "margin = beta * (f_prime(ratio_w) + f_prime(ratio_l))"),
    ("dpo.py", LOSS, "return -(1 - eps) * log_sigma(x) - eps * log_sigma(-x)",
     "return -(1 - eps) * log_sigma(x) + eps * log_sigma(-x)"),
    ("dpo.py", LOSS, "(ratio_w / len_w - ratio_l / len_l - 1 / (2 * beta)) ** 2",
     "(ratio_w / len_w - ratio_l / len_l - 1 / beta) ** 2"),
    ("dpo.py", LOSS, "- gamma)  # arXiv:2405.14734", "+ gamma)  # arXiv:2405.14734"),
    ("dpo.py", LOSS, "(logp_w - ratio_w) - (logp_l - ratio_l)", "(logp_w + ratio_w) - (logp_l + ratio_l)"),
    ("dpo.py", DPO, "torch.where(difference.abs() < 1e-4, 0.5,", "torch.where(difference.abs() < 0, 0.5,"),
    ("dpo.py", DPO, "< shorter, 1.0, args.ld_alpha)", "<= shorter, 1.0, args.ld_alpha)"),
    ("dpo.py", DPO, "loss = objective(seen, args).sum() / len(rows)", "loss = objective(seen, args).mean()"),
    ("dpo.py", DPO, "if others else batch\n", "if False else batch\n"),
    ("dpo.py", DPO, "reference.sync(args.sync_mix)  # after", "reference.sync()  # after"),
    ("dpo.py", DPO, "                optimizer.zero_grad()\n", ""),
    ("dpo.py", DPO, "    rise = round(warmup * steps)\n", "    rise = round(warmup * steps) + 1\n"),
    ("kto.py", KTO, ".clamp(min=0)\n", "\n"),
    ("kto.py", KTO, "sign * (batch.ratio - z)", "sign * (batch.ratio + z)"),
    ("kto.py", KTO, "order[turn:] + order[:turn]", "order[1:] + order[:1]"),
    ("kto.py", KTO, "max(1.0, undesirable / desirable)", "max(1.0, desirable / undesirable)"),
    ("rloo.py", RLOO, "leave_one_out(reward - args.beta * ratio)", "leave_one_out(reward) - args.beta * ratio"),
    ("rloo.py", RLOO, "leave_one_out(reward - args.beta * ratio)", "leave_one_out(reward + args.beta * ratio)"),
    ("rloo.py", RLOO, "drawn.ended, rewards, math.nan)", "~drawn.ended, rewards, math.nan)"),
    ("rloo.py", SAMPLE, "kept = TopPLogitsWarper(top_p)(None, kept)", "kept = TopPLogitsWarper(top_p)(None, logps)"),
    ("rloo.py", SAMPLE, "positions = (mask.cumsum(1) - 1).clamp(min=0)",
     "positions = torch.arange(ids.shape[1], device=device).expand_as(ids)"),
    ("rloo.py", SAMPLE, "torch.where(ended, t + 1, lengths[rows])", "torch.where(ended, t, lengths[rows])"),
    ("rloo.py", SAMPLE, "x.masked_fill(late, 0.0).sum(1)", "x.sum(1)"),
    # data, checkpoints
    ("dpo.py", DATA, "end = common_prefix(ids)", "end = len(ids[0])"),
    ("dpo.py", DATA, "front = full[:next(", "front = full[1:next("),
    ("dpo.py", DATA, "over < len(ids[0])", "over < len(ids[0]) + 9"),
    ("dpo.py", DATA, "2 * bad > len(rows)", "9 * bad > len(rows)"),
    ("dpo.py", RESUME, 'refuse(theirs != mine, f"{out} holds', 'refuse(False, f"{out} holds'),
    ("dpo.py", RESUME, "            file.truncate(", "            0 and file.truncate("),
    ("dpo.py", RESUME, 'generator(seed, "step", step)', 'generator(seed, "step", 0)'),
    ("dpo.py", RESUME, "identity, pending, **changing)", "identity, (), **changing)"),
    ("dpo.py", RESUME, "one.is_relative_to(two) or two", "two"),
    ("dpo.py", RESUME, "or two.is_relative_to(one)", ""),
    ("dpo.py", RESUME, "digest.update(tensor.reshape(-1).view(torch.uint8).numpy())", "tensor"),
    ("dpo.py", RESUME, "refuse(not saved or kinds[0] != kinds[1],", "refuse(not saved,"),
    ("dpo.py", RESUME, "key: (x.shape, x.dtype)", "key: x.shape"),
    ("dpo.py", RESUME, "refuse(not saved or kinds", "refuse(kinds"),
    ("dpo.py", RESUME, "own[key].copy_(part_of(x, own[key]))", "own[key]"),
    ("dpo.py", RESUME, 'lr_factor(state["step"] + n + 1', "lr_factor(n + 1"),
    ("dpo.py", RESUME, 'counts = [step, values["step"], sizes', "counts = [step, sizes"),
    ("dpo.py", RESUME, "or bool(sizes[METRICS]) != bool(step)", ""),
    ("dpo.py", RESUME, "shutil.rmtree(folder, ignore_errors=True)\n    folder.mkdir()", "folder.mkdir()"),
    ("dpo.py", RESUME, "others = {name for name, _ in thing.named_parameters(remove_duplicate=False)}", ""),
    ("dpo.py", RESUME, "and (new or not is_ours(path))", "and new"),
    ("rloo.py", RESUME, 'name.startswith("code of") and theirs != mine', "False"),
    ("dpo.py", RESUME, 'mine[f"settings of --{name}"] =', "_ ="),
    ("dpo.py", DATA, "refuse(len(dict(pairs)) < len(pairs)", "refuse(False"),
    ("dpo.py", DATA, 'if prompt[-1]["role"] == "assistant" else', "if False else"),
    ("dpo.py", DATA, "[] if front == ids[0][:len(front)] else front", "front"),
    ("refcache.py", LOG, "attention_mask.stride(-1) == 0", "True"),
    ("refcache.py", LOG, "attention_mask=None if ones else attention_mask", "attention_mask=attention_mask"),
    ("dpo.py", RESUME, 'shutil.rmtree(out / ".checkpoint", ignore_errors=True)  # a kill', "pass  # a kill"),
    ("rloo.py", SAMPLE, "if 0 < unfinished <= 0.75 * len(alive)", "if unfinished <= 0.75 * len(alive)"),
]
EQUIVALENT = {  # text -> why nothing can notice
    "attention_mask=(ids >= 0).long()), sources": "padding is on the right, where no causal attention looks",
    'if getattr(config, "attn_logit_softcapping", None):': "only transformers 5.17 lets sdpa drop the softcap",
    "if core._is_stateful or not layers": "the probe refuses recurrent models, too",
    "            os.fsync(file.fileno())\n": "only a power cut shows it",
}


def tests(folder: str, *names) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names,
               "--ignore=tests/test_scripts.py", "--ignore=tests/test_change_it.py"]  # they compare texts
    done = subprocess.run(command, cwd=folder, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode in (0, 5)


def main():
    chosen, alive, began = sys.argv[1:], [], time.time()
    if not tests(str(ROOT)):
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
        alive += [number] if lives and not known else []
        print(f"{number:3} {time.time() - began:5.0f} s  {'LIVES ' + known if lives else 'killed'}  {file}: {old!r}",
              flush=True)
    print(f"{len(alive)} of {len(MUTANTS)} live without a reason: {alive}")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
