"""A step of a script, or of TRL, at real sizes on a simulated GPU: memory, time, kernels, and waits of the host.

    python benchmarks/simulate.py                                     # which card: the table of README.md
    python benchmarks/simulate.py dpo --model Qwen3-8B --lora_r 16    # other flags are the script's
    python benchmarks/simulate.py rloo --tokens 4096 --median 512 --k 8    # also ms per token of a rollout
    python benchmarks/simulate.py trl --config FILE --gpu A100        # DPOConfig's; needs trl==1.16.0

main() of the script, or DPOTrainer, runs on fake CUDA tensors (fake_gpu.py; needs g++). Replaced are weights (shapes
only), rows, checkpoints, and what compares log-probs. Time is a roofline's, without communication between GPUs.

--compile estimates changes/compile.patch: see FakeGPU.compile. Another patch of changes/ is simulated in a copy of the
scripts, which the environment variable CHECKOUT names: see README.md.
"""
import contextlib
import io
import multiprocessing
import tempfile
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Literal
from unittest.mock import patch

from fake_gpu import GPUS, FakeGPU  # before torch
import numpy as np
import torch
import torch.distributed as dist
import tyro
from against_trl import NAMES, ROOT, SHAPES, call_after_steps, dpo, kto, rloo
import refcache  # of the same checkout
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PHASES = ("load_model", "compute", "rollout", "compute_logprobs", "run_batch")  # functions that are measured


@dataclass
class Args:
    what: Annotated[Literal["cards", "dpo", "kto", "rloo", "trl"], tyro.conf.Positional] = "cards"
    model: Literal[tuple(SHAPES)] = "Qwen2.5-1.5B"
    config: str | None = None  # a config.json instead
    gpu: Literal[tuple(GPUS)] = "H100"
    processes: int = 1  # one of them is shown
    tokens: int = 16384  # of a forward; rloo: of the prompts
    forwards: int = 1  # of a step
    median: int = 256  # tokens of a prompt, and of an answer
    host: float = 5.0  # microseconds of the host for each kernel
    compile: bool = False  # estimate changes/compile.patch: fewer bytes of norms, MLPs and log-softmax
    tiny: bool = False  # every script, in seconds


def load_stored(kind, name, *_, config=None, dtype="auto", output_loading_info=False, **__):
    """PreTrainedModel.from_pretrained of a checkpoint in bfloat16: shapes without data."""
    with torch.device("meta"):
        config = config or AutoConfig.from_pretrained(name)
        model = kind._from_config(config, dtype="bfloat16" if dtype == "auto" else dtype)
    model.name_or_path = str(name)
    return (model, {"missing_keys": set()}) if output_loading_info else model


def passing_error(core, lay_out) -> tuple:
    """refcache.error_of a model whose completions can share a prompt: 0 nats, and 1 without spans."""
    return float(hasattr(lay_out, "keywords")), torch.float32


def random_rows(script, args: Args) -> list:
    rng = np.random.default_rng(0)
    rows = []
    tokens = 0
    while True:
        lengths = args.median * rng.lognormal(0, 0.5, 3).clip(0.1, 4)
        x, y, z = ((len(rows) + i,) * int(length) for i, length in enumerate(lengths))
        tokens += len(x) if script is rloo else len(x + y + z)
        if tokens > 0.95 * args.tokens * args.forwards * args.processes:  # packed, they fill so many forwards
            return rows
        values = dict(prompt=x, chosen=y, rejected=z, completion=y, other=z, is_desirable=len(rows) % 2 == 0,
                      whole_prompt=x, columns={"prompt": ""})
        rows.append(script.Row(*map(values.get, script.Row._fields)))


def make_folder(args: Args, folder: str):
    config = AutoConfig.for_model(**dict(zip(NAMES, SHAPES[args.model])), max_position_embeddings=32768)
    if args.config:
        config = AutoConfig.from_pretrained(args.config)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    save_file({}, f"{folder}/model.safetensors")  # no weights
    AutoTokenizer.from_pretrained(ROOT / "demo/model").save_pretrained(folder)


def run(args: Args, flags: list[str]) -> list[tuple]:
    """Returns [(phase, what FakeGPU.measure() found), ..]."""
    if "--lora_r" in flags:
        import peft  # noqa: F401  while there is no GPU
    init_process_group = dist.init_process_group
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          contextlib.redirect_stderr(io.StringIO()),
          patch.object(dist, "init_process_group", lambda **_: init_process_group(
              "fake", rank=0, world_size=args.processes, store=FakeStore())),
          patch.object(PreTrainedModel, "from_pretrained", classmethod(load_stored))):
        make_folder(args, folder)
        return (run_trl if args.what == "trl" else run_script)(args, flags, folder)


def run_script(args: Args, flags: list[str], folder: str) -> list[tuple]:
    script = dict(dpo=dpo, kto=kto, rloo=rloo)[args.what]
    rows = random_rows(script, args)
    given = replace(
        tyro.cli(script.Args, args=flags, use_underscores=True), model=folder, data="none", out=f"{folder}/out",
        steps=1, batch_size=len(rows), max_length=32000, tokens_per_forward=args.tokens)
    gpu = FakeGPU(args.gpu, host_seconds=1e-6 * args.host)
    if script is rloo:
        given.reward = ("zero",)  # see load_rewards below
        gpu.integers = max(len(rows) * given.k, given.max_new_tokens)  # of samples that go on, and of their tokens
    found = []

    def measured(name, function):
        def call(*values, **names):
            with gpu.measure() as phase:
                result = function(*values, **names)
            found.append((name, phase))
            if name == "load_model" and args.compile:
                compile_layers(gpu, result)
            return result
        return call

    def end_of_step():  # a step is what happens between the first two lines of metrics.jsonl
        step.close()
        if "step" not in dict(found):
            found.append(("step", step.enter_context(gpu.measure())))

    call_after_steps(script, end_of_step)
    nothing = ("save_checkpoint", "save_model", "check_agreement", "barrier")
    replaced = {name: lambda *_: None for name in nothing} | dict(
        load_data=lambda *_: (rows, []), error_of=passing_error,
        rows_in_order=lambda rows, *_: rows, process_count=lambda: args.processes,
        all_gather=lambda mine: [mine] * args.processes,
        __getitem__=lambda cache, key: np.zeros(len(key[1]), np.float32),  # other processes have scored most rows
        load_rewards=lambda *_: [("zero", lambda completions, **_: [0.0] * len(completions), 1.0)])
    if args.compile:
        replaced["log_softmax_at"] = gpu.compile(refcache.log_softmax_at)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as step:
        for owner in (script, refcache, refcache.ReferenceCache):
            functions = {name: measured(name, function) for name, function in vars(owner).items() if name in PHASES}
            functions |= {name: function for name, function in replaced.items() if name in vars(owner)}
            stack.enter_context(patch.multiple(owner, **functions))
        stack.enter_context(gpu)
        script.main(given)
    if gpu.forbidden:
        raise RuntimeError(f"a step of decoding waits for the GPU: {gpu.forbidden}")
    for name, phase in found:
        phase.tokens = given.max_new_tokens if name == "rollout" else None
    return found + [("graph of a token", graph) for graph in gpu.graphs[:1]]


def compile_layers(gpu: FakeGPU, model):
    """What changes/compile.patch does to a model, estimated."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.forward = gpu.compile(module.forward)


def run_trl(args: Args, flags: list[str], folder: str) -> list[tuple]:
    """DPOTrainer, with 8 pairs per forward."""
    from datasets import Dataset
    from transformers import HfArgumentParser
    from trl import DPOConfig, DPOTrainer
    from trl.kernels import chunked_logprob as head
    from trl.trainer import utils
    rows = random_rows(dpo, args)
    batches = -(-len(rows) // 8)
    answers = sum(len(row.chosen + row.rejected) for row in rows)
    gpu = FakeGPU(args.gpu, integers=answers // batches)  # the tokens that its head gets

    class Kernel:  # of Triton: one pass over a tile of logits
        def __getitem__(self, grid):
            return lambda tile, *_, **__: gpu.add_kernels(1, 2 * tile.numel() * tile.element_size())

    head._use_triton = utils._use_triton = lambda device: True
    head._forward_kernel = head._backward_kernel = Kernel()
    head.triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    given = ["--output_dir", f"{folder}/out", "--max_steps", "1", "--save_strategy", "no", "--report_to", "none",
             "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", str(batches)]
    data = Dataset.from_list([dict(prompt_ids=row.prompt, chosen_ids=row.chosen, rejected_ids=row.rejected)
                              for row in rows])
    with gpu, patch.object(DPOTrainer, "_prepare_dataset", lambda trainer, dataset, *_: dataset):
        (config,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses(given + flags)
        with gpu.measure() as load:
            trainer = DPOTrainer(folder, args=config, train_dataset=data)
        with gpu.measure() as step:
            trainer.train()
    return [("load and score", load), ("step", step)]


def report(args: Args, flags: list[str]):
    found = run(args, flags)
    for name, phase in found:
        counts, seconds = phase.counts, phase.seconds
        print(f"| {' '.join([args.what, *flags])} | {name} | {counts['kernels']:,} | {len(phase.waits)} "
              f"| {1e3 * seconds:,.1f} | {counts['seconds'] / seconds:.0%} "
              f"| {counts['flops'] / seconds / GPUS[args.gpu][0] / 1e12:.0%} | {phase.before / 1e9:.2f} "
              f"| {phase.peak / 1e9:.2f} |", flush=True)
    if args.what == "rloo" and not args.tiny:
        print(f"a rollout takes {token_ms(found):.1f} ms per token")


def token_ms(found: list[tuple]) -> float:
    rollout = dict(found)["rollout"]
    return 1e3 * rollout.seconds / rollout.tokens


def cards(args: Args):
    """Which card DPO needs, and which one RLOO."""
    print(f"| model | GPUs | flags | loading GB | step GB | ms on {args.gpu} |\n" + "|---" * 6 + "|", flush=True)
    for model in ("Qwen3-0.6B", "Qwen2.5-1.5B", "Qwen3-8B"):
        for processes, flags in ((1, ["--lora_r", "16"]), (1, []), (8, [])):
            for more in ([], ["--gradient_checkpointing"]):
                found = run_fresh(replace(args, what="dpo", model=model, processes=processes), flags + more)
                loading, step = loading_and_step(found)
                print(f"| {model} | {processes} | {' '.join(flags + more)} | {loading / 1e9:.1f} "
                      f"| {step.peak / 1e9:.1f} | {1e3 * step.seconds:,.0f} |", flush=True)

    print(f"\n| model | flags of rloo.py | loading GB | rollout GB | step GB | rollout ms per token | step ms "
          f"on {args.gpu} |\n" + "|---" * 7 + "|", flush=True)
    for model, flags in (("Qwen3-0.6B", ["--k", "8"]), ("Qwen2.5-1.5B", ["--k", "8"]),
                         ("Qwen3-8B", ["--k", "4", "--lora_r", "16", "--gradient_checkpointing"])):
        found = run_fresh(replace(args, what="rloo", model=model, tokens=4096, median=512), flags)
        loading, step = loading_and_step(found)
        print(f"| {model} | {' '.join(flags)} | {loading / 1e9:.1f} | {dict(found)['rollout'].peak / 1e9:.1f} "
              f"| {step.peak / 1e9:.1f} | {token_ms(found):.1f} | {1e3 * step.seconds:,.0f} |", flush=True)


def run_fresh(args: Args, flags: list[str]) -> list[tuple]:
    """run() in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        return fresh.apply(run, (args, flags))


def loading_and_step(found: list[tuple]):
    return max(phase.peak for name, phase in found if name == "load_model"), dict(found)["step"]


def main(args: Args, flags: list[str]):
    if args.what == "cards" and not args.tiny:
        return cards(args)
    print("| run | phase | kernels | waits | ms | GPU busy | FLOP/s | GB before | peak GB |\n" + "|---" * 9 + "|")
    if not args.tiny:
        return report(args, flags)
    args = replace(args, what="dpo", model="tiny", tokens=1000, median=20)
    report(args, ["--ref", "swap"])
    report(replace(args, tokens=2000), ["--ref", "swap"])
    report(replace(args, what="kto"), [])
    report(replace(args, what="rloo", tokens=300), ["--k", "2", "--max_new_tokens", "20"])


if __name__ == "__main__":
    main(*tyro.cli(Args, use_underscores=True, return_unknown_args=True))
