"""Breaks the code in small ways and lists which of them the quick tests do not notice.

    python tests/mutants.py              # all, about 15 minutes on one core
    python tests/mutants.py ratio beta   # those whose text contains one of these words

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

MUTANTS = {  # (file, tests that should notice) -> (text, replacement) each
    ("refcache.py", "test_logprobs"): [
        ("range(len(prompt), len(prompt) + len(y))", "range(len(prompt) + 1, len(prompt) + len(y) + 1)"),
        ("sources += [before[-1:], own[:-1]]", "sources += [own]"),
        ("keys += [before, own]", "keys += [before[1:], own]"),
        ("key_ends.append(key_ends[-1] + len(prompt) + len(y))", "key_ends.append(key_ends[-1] + len(y))"),
        ("if len(ids) < key_ends[-1] else None", "if len(ids) + 9 < key_ends[-1] else None"),
        ("window = (sliding_window - 1 if sliding_window else -1, 0)",
         "window = (sliding_window if sliding_window else -1, 0)"),
        ('scale=kwargs.get("scaling")', "scale=None"),
        (".triu(n_before - reach + 1)", ".triu(n_before - reach)"),
        ("first = row * ids.shape[1] + len(prompt) - 1", "first = row * ids.shape[1] + len(prompt)"),
        ("shared < blind / ratio", "True"),
        ("if not (shared < limit", "if not (True"),
        ("logits / temperature if", "logits if"),
        ('core.forward(inputs["input_ids"], use_cache=False).logits.flatten(0, 1)', "core.lm_head(hidden)"),
        ("dtype=torch.float32) for weight", "dtype=weight.dtype) for weight"),
        ("chunk_size = max(1, budget //", "chunk_size = max(10**9, budget //"),
        ("if length > context or max(map(max", "if max(map(max"),
        (', "index_topk", "keep_window_size")', ")"),
        ("(load + sizes[i]) * width > budget", "load * width > budget"),
        ("y = y[:len(y) // 2] if cut else y", "pass")],
    ("refcache.py", "test_dpo"): [
        ("ratios = ratios - to_device", "ratios = ratios + to_device"),
        ("if not difference < limit:", "if difference < -limit:")],
    ("refcache.py", "test_swap"): [
        ("ratios = ratios.clamp(*clamp)", "pass"),
        ("theirs.copy_(before,", "theirs.copy_(mine,"),
        ("theirs.lerp(mine, mix)", "mine.lerp(theirs, mix)"),
        ("not is_frozen or not torch.equal", "not is_frozen or False and not torch.equal"),
        ("        if differing:\n            raise", "        if False:\n            raise")],
    ("refcache.py", "test_cache"): [
        ('if theirs != mine and name != "name":', "if False:"),
        ('if hashlib.sha256(pickled).hexdigest() != header["sha256"]:', "if False:"),
        ("os.stat(path) != self.stamp:", "self.stamp is None:"),
        ("    if others:\n        raise BadInput", "    if False:\n        raise BadInput"),
        ("            del model\n            gc", "            gc"),
        ("            if Path(path).exists() and os", "            if False and os"),
        ("if not logprobs.isfinite().all():", "if False:"),
        ("        finally:\n            if path:\n                self.save",
         "        finally:\n            if False:\n                self.save"),
        ('digest.update(np.memmap(file, np.uint8, "r"))', "digest.update(np.memmap(file, np.uint8, 'r')[:99])")],
    ("refcache.py", "test_processes"): [
        ("module.set_gradient_divide_factor(1.0)", "pass"),
        ('register_fsdp_forward_method(core, "flat_logprobs")', "pass"),
        ("if len(set(all_gather(digest))) > 1:", "if False:"),
        ('torch.bfloat16 if dtype == "bfloat16" else None', "None")],
    ("refcache.py", "test_simulate"): [
        ("/ 64 * tokens_per_forward", "* tokens_per_forward"),
        ("(weights, 3 * trained,", "(weights, 2 * trained,")],
    ("dpo.py", "test_simulate"): [
        ("args.tokens_per_forward) > 0.85", "args.tokens_per_forward) > 0.87"),
        ('(is_large and args.gradient_checkpointing == "auto")', "is_large")],
    ("dpo.py", "test_processes"): [
        ("means = all_reduce(torch", "means = (torch")],
    ("kto.py", "test_processes"): [
        ("mean = all_reduce(total) / max", "mean = total / max"),
        ("batch.ratio.sum() * counts", "batch.ratio.sum()")],
    ("dpo.py", "test_dpo_losses"): [
        ("return -(1 - eps) * log_sigma(margin) - eps", "return -(1 - eps) * log_sigma(margin) + eps"),
        ('if args.loss == ("simpo",):', "if False:")],
    ("dpo.py", "test_dpo"): [
        ("torch.where(is_tie, 0.5,", "torch.where(is_tie, 0.0,"),
        ("        optimizer.zero_grad()\n", ""),
        ("round(args.warmup * steps) if", "round(args.warmup * steps) + 1 if"),
        ("value.zero_()", "value")],
    ("dpo.py", "test_references"): [
        ("reference.sync(args.sync_mix)  # after", "reference.sync()  # after"),
        ("if weight.dim() > 1", "if True")],
    ("kto.py", "test_kto"): [
        ("return mean.clamp(min=0)", "return mean"),
        ("(value.detach() * mask).sum()", "value.detach().sum()"),
        ("sign * (batch.ratio - z)", "sign * (batch.ratio + z)"),
        ("order[(i + n) % len(order)]", "order[n]")],
    ("rloo.py", "test_rloo"): [
        ("leave_one_out(rewards - beta * kl)", "leave_one_out(rewards + beta * kl)"),
        ("torch.where(samples.ended, rewards", "torch.where(~samples.ended, rewards"),
        ("np.atleast_1d(core.generation_config.eos_token_id)", "np.array([None])"),
        ('texts.append(text.partition("\\uffff")[0])', "texts.append(text)")],
    ("rloo.py", "test_rollout"): [
        ("positions = (mask.cumsum(1) - 1).clamp(min=0)",
         "positions = torch.arange(ids.shape[1], device=device).expand_as(ids)"),
        ("torch.where(alive, token, -1)", "token"),
        ("self.room[0].shape[2] == n", "self.room[0].shape[2] == n - 1"),
        ("        super().batch_select_indices(indices)\n        self.room = None",
         "        super().batch_select_indices(indices)"),
        ("check_sampler(policy, tokenizer, args)\n    ref", "ref")],
    ("dpo.py", "test_data"): [
        ("len(os.path.commonprefix([prompt, ids]))", "len(prompt)"),
        ("len(text.rpartition(eos)[0] or text)", "len(text)"),
        ("start -= 1  #", "pass  #"),
        ("ids if ids[:len(bos)] == bos else bos + ids", "bos + ids"),
        ('if roles & {"user", "system"}:', "if False:"),
        ("if 2 * kept < len(rows):", "if not kept:"),
        ("if as_chat and isinstance(prompt, str):", "if False:")],
    ("rloo.py", "test_data"): [
        ('if prompt[-1]["role"] == "assistant" else', "if False else")],
    ("dpo.py", "test_resume"): [
        ("    if differing != code:", "    if False:"),
        ("os.truncate(out / name, size)", "pass"),
        ("torch.manual_seed(args.seed + step)", "pass"),
        ("step in (first, last_step + 1):", "step == first:"),
        ('state["reference"] = reference', "pass"),
        ('state |= {f"optimizer', '_ = {f"optimizer'),
        ("shutil.rmtree(folder, ignore_errors=True)  # of a killed save", "pass")],
    ("kto.py", "test_resume"): [
        ('run["functions"] =', "_ =")],
}


def tests(folder: str, *names) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names,
               "--ignore=tests/test_scripts.py", "--ignore=tests/test_changes.py"]  # they compare texts
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=300)
    except subprocess.TimeoutExpired:  # processes that wait for each other
        return False
    return done.returncode in (0, 5)


def main():
    chosen = sys.argv[1:]
    alive = 0
    began = time.time()
    if not chosen and not tests(str(ROOT)):
        sys.exit("the quick suite fails without any fault: nothing can be learnt")
    mutants = [(*where, *texts) for where, several in MUTANTS.items() for texts in several]
    for number, (file, names, old, new) in enumerate(mutants):
        text = (ROOT / file).read_text()
        if text.count(old) != 1:
            sys.exit(f"mutant {number}: {old!r} stands {text.count(old)} times in {file}")
        if chosen and not any(word in old for word in chosen):
            continue
        with tempfile.TemporaryDirectory() as folder:
            left_out = shutil.ignore_patterns(".git", "out", "__pycache__")
            shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=left_out)
            (Path(folder) / file).write_text(text.replace(old, new))
            lives = tests(folder, f"tests/{names}.py") and tests(folder)
        alive += lives
        print(f"{number:3} {time.time() - began:5.0f} s  {'LIVES' if lives else 'killed'}  {file}: {old!r}",
              flush=True)
    print(f"{alive} of {len(mutants)} live")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
