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
        ("np.arange(len(prompt), end)", "np.arange(len(prompt) + 1, end + 1)"),
        ("sources += [before[-1:], own[:-1]]", "sources += [own]"),
        ("keys += [before, own]", "keys += [before[1:], own]"),
        ("key_ends.append(key_ends[-1] + end)", "key_ends.append(key_ends[-1] + len(completion))"),
        ("if len(ids) < key_ends[-1] else None", "if len(ids) + 9 < key_ends[-1] else None"),
        ("window = (sliding_window - 1 if sliding_window else -1, 0)",
         "window = (sliding_window if sliding_window else -1, 0)"),
        ('scale=kwargs.get("scaling")', "scale=None"),
        (".triu(n_before - reach + 1)", ".triu(n_before - reach)"),
        ("first = len(rows) * width + len(prompt) - 1", "first = len(rows) * width + len(prompt)"),
        ("shared < blind / ratio", "True"),
        ("if not (shared < limit", "if not (True"),
        ("logits = logits / temperature", "pass"),
        ('core.forward(inputs["input_ids"], use_cache=False).logits.flatten(0, 1)', "core.lm_head(hidden)"),
        ("dtype=torch.float32) for weight", "dtype=weight.dtype) for weight"),
        ("chunk_size = max(1, budget //", "chunk_size = max(10**9, budget //"),
        ("if length > context or max(map(max", "if max(map(max"),
        (', "index_topk", "keep_window_size")', ")"),
        ("(load + sizes[i]) * width > budget", "load * width > budget"),
        ("completion = completion[:len(completion) // 2]", "pass")],
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
        ("    if others:\n        raise BadInput", "    if False:\n        raise BadInput"),
        ("            del model  # the caller keeps none", "            pass"),
        ("            if Path(path).exists():  # another", "            if False:  # another"),
        ("if not logprobs.isfinite().all():", "if False:"),
        ("            if path:  # the last thing", "            if False:  # the last thing"),
        ('digest.update(np.memmap(file, np.uint8, "r"))', "digest.update(np.memmap(file, np.uint8, 'r')[:99])")],
    ("refcache.py", "test_processes"): [
        ("module.set_gradient_divide_factor(1.0)", "pass"),
        ("torch.cuda.set_device(device)", "pass"),
        ("StepMemory(*np.max(all_gather(mine), axis=0))", "StepMemory(*mine)"),
        ('register_fsdp_forward_method(core, "flat_logprobs")', "pass"),
        ("if len(set(all_gather(digest))) > 1:", "if False:"),
        ('torch.bfloat16 if dtype == "bfloat16" else None', "None")],
    ("refcache.py", "test_simulate"): [
        ("/ 64 * tokens_per_forward", "* tokens_per_forward"),
        ("mine = weights, 3 * trained,", "mine = weights, 2 * trained,")],
    ("dpo.py", "test_simulate"): [
        ("is_large = memory.used > 0.85", "is_large = memory.used > 0.87"),
        ('(is_large and args.gradient_checkpointing == "auto")', "is_large")],
    ("dpo.py", "test_processes"): [
        ('state["reference"] = reference', "pass"),
        ("means = all_reduce(torch", "means = (torch")],
    ("kto.py", "test_processes"): [
        ("mean = all_reduce(total) / max", "mean = total / max"),
        ("batch.ratio.sum() * is_real", "batch.ratio.sum()")],
    ("dpo.py", "test_dpo_losses"): [
        ("return -(1 - eps) * log_sigma(margin) - eps", "return -(1 - eps) * log_sigma(margin) + eps"),
        ('if args.loss == ("simpo",):', "if False:")],
    ("dpo.py", "test_dpo"): [
        ("torch.where(is_tie, 0.5,", "torch.where(is_tie, 0.0,"),
        ("round(args.warmup * steps) if", "round(args.warmup * steps) + 1 if"),
        ("np.nanmean(scores)", "np.mean(scores)"),
        ("len(set(texts))", "len(texts)"),
        ("one_per_prompt = {row.whole_prompt: row", "one_per_prompt = {row.prompt: row"),
        ("remove_checkpoints(out)  # the run is finished", "pass"),
        ("before.keys() < values.keys()", "False"),
        ('ref="none", sync_reference=None)', 'ref="none")')],
    ("dpo.py", "test_references"): [
        ("        optimizer.zero_grad()\n", ""),
        ("value.zero_()", "value"),
        ("reference.sync(args.sync_mix)  # after", "reference.sync()  # after"),
        ("if weight.dim() > 1", "if True")],
    ("kto.py", "test_kto"): [
        ("return mean.clamp(min=0)", "return mean"),
        ("(value.detach() * mask).sum()", "value.detach().sum()"),
        ("sign * (batch.ratio - z)", "sign * (batch.ratio + z)"),
        ("order[(i + n) % len(order)]", "order[n]"),
        ("if not 0.75 * balanced <= args", "if not 0 <= args"),
        ("{balanced / 1.17:", "{balanced:")],
    ("rloo.py", "test_rloo"): [
        ("leave_one_out(rewards - beta * kl)", "leave_one_out(rewards + beta * kl)"),
        ("torch.where(samples.ended, rewards", "torch.where(~samples.ended, rewards"),
        ("np.atleast_1d(core.generation_config.eos_token_id)", "np.array([None])"),
        ('texts.append(text.partition("\\uffff")[0])', "texts.append(text)"),
        ("pad = self.model.config.get_text_config()", "pad = self.model.config"),
        ('raise BadInput("out of memory in a rollout: lower --rollout_tokens") from error', "raise"),
        ("len(set(chain(*samples.texts)))", "len(list(chain(*samples.texts)))")],
    ("rloo.py", "test_processes"): [
        ("if any(theirs != mine for theirs in all_gather(mine)):", "if False:")],
    ("dpo.py", "test_lora"): [
        ("config.is_prompt_learning or config.is_adaption_prompt or", "config.is_prompt_learning or")],
    ("rloo.py", "test_rollout"): [
        ("positions = (mask.cumsum(1) - 1).clamp(min=0)",
         "positions = torch.arange(ids.shape[1], device=device).expand_as(ids)"),
        ("torch.where(alive, token, -1)", "token"),
        ("else int(self.place) + 1", "else int(self.place)"),
        ("self.values.index_copy_(2, self.place, value)", "pass"),
        ("inputs = {name: tensor[stay] for name, tensor in inputs.items()}", "pass"),
        ("    check_sampler(policy, tokenizer, args)\n    reference", "    reference")],
    ("dpo.py", "test_data"): [
        ("len(os.path.commonprefix([prompt_ids, ids]))", "len(prompt_ids)"),
        ('if set().union(*answer) != {"role", "content"}:', "if False:"),
        ("start -= 1  #", "pass  #"),
        ("ids if ids[:len(bos)] == bos else bos + ids", "bos + ids"),
        ('if any(message["role"] in ("user", "system")', 'if any(message["role"] == "system"'),
        ('if n_kept < max(1, counts["rows"] / 2):', "if not n_kept:"),
        ('raise ValueError("the prompt ends with a begun answer")', "pass"),
        ('counts["whose template changes a message of the prompt"] += 1', "pass"),
        ("if row.whole_prompt in held_out]", "if row.prompt in held_out]"),
        ("        if shared:", "        if False:"),
        ('r":(?![^\\[]*\\])"', '":"'),
        ('Path(source.removesuffix(".gz"))', "Path(source)"),
        ("', '.join(map(str, columns))[:200]", "', '.join(map(str, columns))")],
    ("kto.py", "test_data"): [
        ("if source.whole_prompt != row.whole_prompt", "if source.prompt != row.prompt")],
    ("dpo.py", "test_flags"): [
        ("if get_origin(kind) is Literal and", "if False and"),
        ("not value >= smallest", "value < 0"),
        ("lr=1e-5 if args.lora_r", "lr=1e-6 if args.lora_r"),
        ('if not Path(folder, "model").exists()', "if True"),
        ('", or neither for the demo" * has_demo', '", or neither for the demo"'),
        ("values = asyncio.run(values)", "pass"),
        ("math.nan if value is None else float(value)", "float(value)"),
        ("if len(numbers) != n:", "if False:"),
        ("function: Callable, n: int, /, **columns", "function: Callable, n: int, **columns"),
        ("if not set() < set(args.loss) <= set(", "if not set(args.loss) <= set("),
        ('raise BadInput(f"{spec}: {error}: add **columns") from None', "raise"),
        ("def load_function(spec", "@lru_cache\ndef load_function(spec"),
        ('id=saved["run"].get("wandb id")', "id=None"),
        ('wandb.log(values, step=values["step"])', "wandb.log(values, step=0)"),
        ('dtype = args.dtype if args.save_dtype == "auto" else "float32"', 'dtype = "float32"'),
        ("if config.exists():  # an adapter", "if False:  # an adapter")],
    ("rloo.py", "test_flags"): [
        ("memory.used + live / memory.gpu < 0.85", "memory.used < 0.85"),
        ("or args.sync_reference or is_frozen or", "or is_frozen or"),
        ("args.sync_reference or is_frozen or not", "args.sync_reference or not")],
    ("rloo.py", "test_data"): [
        ('if prompt[-1]["role"] == "assistant" else', "if False else")],
    ("dpo.py", "test_resume"): [
        ("    if differing:\n", "    if False:\n"),
        ('os.truncate(out / name, saved["sizes"][name])', "pass"),
        ('elif files and "held-out rows" not in', "elif False and"),
        ("        if size and not (", "        if False and not ("),
        (".stat().st_size >= size", ".stat().st_size >= 0"),
        ("        for name in LOGS:\n            (out", '        for name in saved["sizes"]:\n            (out'),
        ("shutil.rmtree(hidden, ignore_errors=True)", "pass"),
        ('run = {"script": Path(__file__).name}', "run = {}"),
        ("torch.manual_seed(args.seed + step)", "pass"),
        ('state[f"optimizer.{name}.{key}"] = value.zero_()', "value.zero_()"),
        ("shutil.rmtree(folder, ignore_errors=True)  # of a killed save", "pass")],
    ("kto.py", "test_resume"): [
        ('glob("*.j[is]*")', 'glob("*.nothing")'),
        ('MAY_CHANGE = ("model ref_model data', 'MAY_CHANGE = ("ref_model data'),
        ('run["functions"] =', "_ =")],
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
