"""Breaks the code in forty small ways and lists which of them the quick tests do not notice.

    python tests/mutants.py              # all of them
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
        ("np.arange(len(prompt), end)", "np.arange(len(prompt) + 1, end + 1)"),
        ("sources += [before[-1:], own[:-1]]", "sources += [own]"),
        ("window = (sliding_window - 1 if", "window = (sliding_window if"),
        (".triu(n_before - reach + 1)", ".triu(n_before - reach)"),
        ("if not (shared < limit", "if not (True"),
        ("logits = logits / temperature", "pass"),
        ("(load + sizes[i]) * width > budget", "load * width > budget")],
    ("refcache.py", "test_dpo"): [
        ("ratios = ratios - to_device", "ratios = ratios + to_device")],
    ("refcache.py", "test_swap"): [
        ("theirs.copy_(before,", "theirs.copy_(mine,"),
        ("theirs.lerp(mine, mix)", "mine.lerp(theirs, mix)")],
    ("refcache.py", "test_cache"): [
        ('if theirs != mine and name != "name":', "if False:"),
        ('digest.update(np.memmap(file, np.uint8, "r"))', "digest.update(np.memmap(file, np.uint8, 'r')[:99])")],
    ("refcache.py", "test_processes"): [
        ("module.set_gradient_divide_factor(1.0)", "pass")],
    ("dpo.py", "test_processes"): [
        ("means = all_reduce(torch", "means = (torch")],
    ("kto.py", "test_processes"): [
        ("mean = all_reduce(total) / max", "mean = total / max")],
    ("dpo.py", "test_dpo_losses"): [
        ("return -(1 - eps) * log_sigma(margin) - eps", "return -(1 - eps) * log_sigma(margin) + eps")],
    ("dpo.py", "test_dpo"): [
        ("torch.where(is_tie, 0.5,", "torch.where(is_tie, 0.0,"),
        ("round(args.warmup * steps) if", "round(args.warmup * steps) + 1 if"),
        ("one_per_prompt = {row.whole_prompt: row", "one_per_prompt = {row.prompt: row")],
    ("dpo.py", "test_references"): [
        ("        optimizer.zero_grad()\n", ""),
        ("value.zero_()", "value")],
    ("kto.py", "test_kto"): [
        ("return mean.clamp(min=0)", "return mean"),
        ("sign * (batch.ratio - z)", "sign * (batch.ratio + z)"),
        ("order[(i + n) % len(order)]", "order[n]")],
    ("rloo.py", "test_rloo"): [
        ("leave_one_out(rewards - beta * kl)", "leave_one_out(rewards + beta * kl)"),
        ("torch.where(samples.ended, rewards", "torch.where(~samples.ended, rewards"),
        ("np.atleast_1d(core.generation_config.eos_token_id)", "np.array([None])")],
    ("rloo.py", "test_rollout"): [
        ("torch.where(alive, token, -1)", "token"),
        ("self.values.index_copy_(2, self.place, value)", "pass"),
        ("    check_sampler(policy, tokenizer, args)\n    reference", "    reference")],
    ("dpo.py", "test_data"): [
        ("len(os.path.commonprefix([prompt_ids, ids]))", "len(prompt_ids)"),
        ("ids if ids[:len(bos)] == bos else bos + ids", "bos + ids"),
        ("start -= 1  #", "pass  #"),
        ("if row.whole_prompt in held_out]", "if row.prompt in held_out]")],
    ("dpo.py", "test_flags"): [
        ("if get_origin(kind) is Literal and", "if False and"),
        ("def load_function(spec", "@lru_cache\ndef load_function(spec"),
        ('dtype = args.dtype if args.save_dtype == "auto" else "float32"', 'dtype = "float32"')],
    ("dpo.py", "test_resume"): [
        ("    if differing:\n", "    if False:\n"),
        ('os.truncate(out / name, saved["sizes"][name])', "pass"),
        ("torch.manual_seed(args.seed + step)", "pass")],
}


def tests(folder: str, *names) -> bool:
    # Four files compare texts, or apply patches to them.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names,
               *(f"--ignore=tests/test_{name}.py" for name in ("scripts", "changes", "changes_rloo", "recipes"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=300)
    except subprocess.TimeoutExpired:  # processes that wait for each other
        return False
    return done.returncode in (0, 5)


def main():
    chosen = sys.argv[1:]
    if not chosen and not tests(str(ROOT)):
        sys.exit("the quick suite fails without any fault: nothing can be learnt")

    began = time.time()
    alive = []
    for file, names, old, new in [(*where, *texts) for where, several in MUTANTS.items() for texts in several]:
        text = (ROOT / file).read_text()
        if text.count(old) != 1:
            sys.exit(f"{old!r} stands {text.count(old)} times in {file}")
        if chosen and not any(word in old for word in chosen):
            continue

        with tempfile.TemporaryDirectory() as folder:
            left_out = shutil.ignore_patterns(".git", "out", "__pycache__")
            shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=left_out)
            (Path(folder) / file).write_text(text.replace(old, new))
            lives = tests(folder, f"tests/{names}.py") and tests(folder)
        alive += [old] * lives
        print(f"{time.time() - began:5.0f} s  {'LIVES' if lives else 'killed'}  {file}: {old!r}", flush=True)
    sys.exit(f"{len(alive)} live" if alive else 0)


if __name__ == "__main__":
    main()
