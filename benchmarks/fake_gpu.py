"""A GPU without a GPU: tensors on "cuda" have shapes, no data; their kernels are counted and timed.

What runs on the CPU is real. On "cuda" are fake tensors of torch, whose operators check shapes, dtypes and devices.
Each is one kernel, or as many as KERNELS says, and takes the longer of FLOPs / rate and bytes / bandwidth. The host
runs ahead until it waits. It reads 1e-6, True, or `integers`. A CUDA graph is recorded by counting: what waits in it
raises, and a replay costs the host one launch. Memory is what tensors hold, not buffers of kernels, allocator, cuBLAS,
NCCL and CUDA context (1 to 2 GB).
"""
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

ROOT = Path(importlib.util.find_spec("torch").origin).parent
SOURCE = Path(__file__).with_suffix(".cpp")
KEY = hashlib.sha256(SOURCE.read_bytes() + (ROOT / "version.py").read_bytes()).hexdigest()
LIBRARY = Path.home() / f".cache/fake_gpu/{KEY}.so"
if not LIBRARY.exists():
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    new = f"{LIBRARY}.{os.getpid()}"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{ROOT}/include", SOURCE, "-o", new], check=True)
    os.replace(new, LIBRARY)
for library in (ROOT / "lib/libtorch_cpu.so", LIBRARY):  # before torch is imported, which looks for its devices
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")  # without it: six operators
GPUS = {  # of the data sheet: bfloat16 TFLOP/s, TB/s; then the shares that matmuls, attention and copies reach
    "H100": (989, 3.35, 0.75, 0.40, 0.90),
    "H200": (989, 4.8, 0.80, 0.40, 0.90),
    "A100": (312, 2.04, 0.80, 0.60, 0.88),
}
HOST_SECONDS, KERNEL_SECONDS = 5e-6, 2e-6  # to start a kernel or a graph; of the smallest kernel
LINK_RATE = 5e10  # bytes per second between CPU and GPU
KERNELS = {"_varlen_attn": 2, "_varlen_attn_backward": 5, "index_add": 2}
NO_KERNEL = ("empty", "new_empty", "resize", "set_", "detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh")


class FakeGPU(TorchDispatchMode):
    """`with gpu:` tensors on "cuda" are fake. `with gpu.measure() as found:` counts."""

    def __init__(self, name: str, integers: int = 1, host_seconds: float = HOST_SECONDS):
        super().__init__()
        flop_rate, byte_rate, *self.shares = GPUS[name]
        self.flop_rate, self.byte_rate = 1e12 * flop_rate, 1e12 * byte_rate
        self.integers = integers
        self.host_seconds = host_seconds  # for each kernel
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.blocks = {}  # id of a storage -> [its weak reference, its bytes]
        self.sent = {}  # id of a storage -> the tensor of integers that the CPU has sent there
        self.memory = self.most = 0  # bytes, now and at the peak
        self.host = self.device = 0.0  # seconds: the clocks of both
        self.counts = Counter()  # kernels, flops, seconds
        self.waits = []  # reasons
        self.measuring = []

        self.sync_mode = "default"  # "error": what waits raises
        self.forbidden = []  # reasons of waits that raised
        self.graphs = []  # what measure() found in each CUDA graph that was recorded

        self.n_compiled = 0  # compiled functions that are running
        self.group = None  # ids of the storages that the present compiled kernel has read
        self.sources = {}  # id of a storage in no memory yet -> what computes it: {id of a storage: bytes}
        pretend(self)

    @contextlib.contextmanager
    def measure(self):
        """Yields what then has counts, waits, seconds; and bytes, before and peak."""
        found = SimpleNamespace(before=self.memory, peak=self.memory)
        counts, waits, began = self.counts.copy(), len(self.waits), max(self.host, self.device)
        self.measuring.append(found)
        yield found
        self.measuring = [other for other in self.measuring if other is not found]
        found.counts, found.waits = self.counts - counts, self.waits[waits:]
        found.seconds = max(self.host, self.device) - began

    def hold(self, tensor):
        """Counts its memory until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.blocks:
            self.blocks[key] = [weakref.ref(storage, lambda _: self.free(key)), 0]
            self.resize(storage, storage.nbytes())

    def resize(self, storage, size):
        block = self.blocks.get(id(storage))
        if block:
            self.allocate(size - block[1])
            block[1] = size

    def allocate(self, size):
        self.memory += size
        self.most = max(self.most, self.memory)
        for found in self.measuring:
            found.peak = max(found.peak, self.memory)

    def free(self, key):
        self.sent.pop(key, None)
        self.sources.pop(key, None)
        self.memory -= self.blocks.pop(key)[1]

    def wait(self, reason: str):
        if self.sync_mode == "error":
            self.forbidden.append(reason)
            raise RuntimeError(f"a synchronizing CUDA operation: {reason}")
        self.waits.append(reason)
        self.host = max(self.host, self.device)

    def add_kernels(self, kernels, moved, flops=0, share=1):
        bandwidth = self.byte_rate * self.shares[2]
        seconds = max(flops / self.flop_rate / share, moved / bandwidth, KERNEL_SECONDS * kernels)
        self.counts.update(kernels=kernels, flops=flops, seconds=seconds)
        self.host += kernels * self.host_seconds
        self.device = max(self.device, self.host) + seconds

    @contextlib.contextmanager
    def record(self, graph):
        """torch.cuda.graph. What runs in it takes no time until graph.replay(). Its memory stays with the graph."""
        self.wait("capture")
        counts, clocks = self.counts.copy(), (self.host, self.device)
        self.sync_mode = "error"
        with self.measure() as found:
            yield
        self.sync_mode = "default"

        graph.counts = found.counts
        found.seconds = found.counts["seconds"]
        self.graphs.append(found)
        self.counts, (self.host, self.device) = counts, clocks
        self.allocate(found.peak - found.before)
        weakref.finalize(graph, self.allocate, found.before - found.peak)

    def replay(self, graph):
        self.counts.update(graph.counts)
        self.host += self.host_seconds
        self.device = max(self.device, self.host) + graph.counts["seconds"]

    def compile(self, function, **_):
        """torch.compile, estimated: all elementwise operators between two matrix products become one kernel. It reads
        once what comes from outside, and writes once what others read of it. What a backward needs of it is computed
        again. Memory is that of the eager function."""
        @functools.wraps(function)
        def compiled(*args, **kwargs):
            self.n_compiled += 1
            try:
                out = function(*args, **kwargs)
            finally:
                self.n_compiled -= 1
                self.group = None
            if out.grad_fn:
                mark_nodes(out.grad_fn, {tensor.grad_fn for tensor in fake_tensors(args, kwargs)})
            return out
        return compiled

    def is_compiled(self) -> bool:
        """Whether the present operator is part of a compiled function, or of its backward."""
        if torch.is_grad_enabled() or self.n_compiled:  # with gradients a backward recomputes a checkpoint's forward
            return self.n_compiled > 0
        node = torch._C._current_autograd_node()
        return node is not None and "compiled" in node.metadata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operators on its shards follow
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **kwargs)  # DTensor asks for the shape of a result
        name = func._schema.name.split("::")[1]
        inputs = fake_tensors(args, kwargs)
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if not inputs and not to_gpu:
            is_pinned = kwargs.pop("pin_memory", False)
            out = func(*args, **kwargs)
            return pin(out) if is_pinned else out
        if inputs and name.endswith("_like") and device is not None and not to_gpu:
            return pin(torch.empty(args[0].shape, dtype=args[0].dtype))  # on the CPU
        if name == "copy_" and len(fake_tensors(args[:2])) == 1:
            return self.transfer(args[1], args[0], len(args) > 2 and args[2])
        if name == "_to_copy" and device is not None and to_gpu != bool(inputs):
            dtype = kwargs.get("dtype") or args[0].dtype
            if to_gpu:
                out = self.run(torch.empty, (args[0].shape,), dict(dtype=dtype, device="cuda"))
                if dtype in (torch.int32, torch.int64):
                    self.sent[id(out.untyped_storage())] = args[0]
            else:
                sent = self.sent.get(id(args[0].untyped_storage()))
                is_whole = sent is not None and (sent.shape, sent.dtype) == (args[0].shape, dtype)
                out = pin(sent.clone() if is_whole else torch.full(args[0].shape, self.value(dtype), dtype=dtype))
            return self.transfer(args[0], out, kwargs.get("non_blocking"))
        if name in ("_local_scalar_dense", "equal"):
            self.wait(name)
            return self.value(args[0].dtype if name == "_local_scalar_dense" else torch.bool)
        if name == "nonzero":  # only the GPU knows how many are True
            self.wait(name)
            out = args[0].new_empty(self.integers, args[0].dim(), dtype=torch.int64)
        elif name == "index" and args[1][0] is not None and args[1][0].dtype == torch.bool:
            self.wait("mask")  # likewise
            out = args[0].new_empty(self.integers, *args[0].shape[args[1][0].dim():])
        else:
            out = self.run(func, args, kwargs)
        if not (func.is_view or name.startswith(NO_KERNEL) or func.namespace == "prim"):
            self.launch(name, func, args, inputs, out)
        return out

    def run(self, func, args, kwargs):
        with self.fake:
            out = func(*args, **kwargs)
        for tensor in fake_tensors(out):
            self.hold(tensor)
        return out

    def value(self, dtype):
        """What the host reads."""
        return 1e-6 if dtype.is_floating_point else dtype == torch.bool or self.integers

    def transfer(self, source, target, non_blocking):
        """Between CPU and GPU. It is waited for unless it is non_blocking and the CPU's memory is pinned."""
        self.add_kernels(1, bytes_of([source]) * self.byte_rate * self.shares[2] / LINK_RATE)
        to_cpu = isinstance(source, FakeTensor)
        if not (non_blocking and hasattr((target if to_cpu else source).untyped_storage(), "pinned")):
            self.wait("copy to the CPU" if to_cpu else "copy to the GPU")
        return target

    def launch(self, name, func, args, inputs, out):
        outputs = fake_tensors(out)
        kernels = KERNELS.get(name, 1)
        moved = bytes_of({id(tensor): tensor for tensor in inputs + outputs}.values())
        flops, share = 0, self.shares[0]
        if name in ("embedding", "index_select", "gather", "index", "nll_loss_forward"):  # they read what they return
            moved = 2 * bytes_of(outputs)
        elif name == "nll_loss_backward":  # it writes zeros, and a number per row
            moved = bytes_of(outputs)
        elif name.startswith(("_foreach", "_fused_adamw")):  # a kernel takes 320 chunks of 65,536 elements
            kernels = 1 + sum(tensor.numel() for tensor in inputs) // (4 * 320 * 65536)
        elif "attn" in name or "attention" in name:
            backward = "backward" in name
            flops = self.attention_flops(inputs[backward:]) * (2.5 if backward else 1)
            share = self.shares[1]
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args[:3] if name == "addmm" else args, out_val=out)
            if inputs[0].dtype == torch.float32:
                share /= 15  # without TF32: 67 of 989

        if not flops and self.is_compiled():
            return self.add_to_group(inputs, outputs)
        self.group = None
        for tensor in inputs:  # the compiled kernel before wrote what is read now
            if self.sources.pop(id(tensor.untyped_storage()), None):
                moved += bytes_of([tensor])
        self.add_kernels(kernels, moved, flops, share)

    def add_to_group(self, inputs, outputs):
        """An operator of a compiled kernel: reads what that has not read yet."""
        kernels = int(self.group is None)
        self.group = self.group or set()
        reads = {}
        for tensor in inputs:
            key = id(tensor.untyped_storage())
            reads |= self.sources.get(key) or {key: bytes_of([tensor])}
        moved = sum(size for key, size in reads.items() if key not in self.group)
        self.group |= reads.keys()
        for tensor in outputs:
            self.sources[id(tensor.untyped_storage())] = reads
        self.add_kernels(kernels, moved)

    def attention_flops(self, inputs) -> float:
        """Of the forward. A span's last query sees all of its keys."""
        query, key = inputs[:2]
        spans = []
        for ends in [tensor for tensor in inputs if tensor.dtype == torch.int32][:2]:  # cu_seq_q, cu_seq_k
            sent = self.sent[id(ends.untyped_storage())]
            spans.append(sent.as_strided(ends.shape, ends.stride(), ends.storage_offset()).diff().tolist())
        tokens_at = 0 if spans else 2  # query: (tokens, heads, size) or (batch, heads, tokens, size)
        spans = zip(*spans) if spans else [(query.shape[2], key.shape[2])]
        scores = sum(q * (k - q) + q * (q + 1) / 2 for q, k in spans)
        return 4 * scores * query.numel() / query.shape[tokens_at]


def fake_tensors(*trees) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, FakeTensor)]


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def mark_nodes(node, ends: set):
    """Marks the backward of a function, from the node of its result to those of its inputs, without its weights."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in ends or node.name().endswith("AccumulateGrad") or "compiled" in node.metadata:
            continue
        node.metadata["compiled"] = True
        waiting += [following for following, _ in node.next_functions]


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu: FakeGPU):
        self.gpu = gpu

    def replay(self):
        self.gpu.replay(self)


def pin(tensor, *_):
    tensor.untyped_storage().pinned = True
    return tensor


def pretend(gpu: FakeGPU):
    """What torch asks of CUDA outside of operators, until this process ends."""
    stream = MagicMock()  # or event
    stream.return_value.synchronize.side_effect = lambda: gpu.wait("event")
    stream.return_value.record_event.return_value = stream()
    stream.return_value.is_capturing.return_value = False
    answers = dict(
        is_available=True, device_count=1, current_device=0, is_bf16_supported=True, get_device_capability=(9, 0),
        get_device_name="simulated", current_stream=stream(), stream=contextlib.nullcontext(), set_stream=None,
        set_device=None, empty_cache=None, _lazy_init=None)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = stream
    torch.accelerator.current_stream = lambda *_: stream()
    torch.cuda.synchronize = lambda *_: gpu.wait("synchronize")
    torch.cuda.CUDAGraph, torch.cuda.graph = functools.partial(Graph, gpu), gpu.record
    torch.cuda.set_sync_debug_mode = functools.partial(setattr, gpu, "sync_mode")
    torch.cuda.memory_allocated, torch.cuda.max_memory_allocated = lambda *_: gpu.memory, lambda *_: gpu.most
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device="cuda") is made on the CPU, then copied
    torch.Tensor.pin_memory = pin
    torch.Tensor.record_stream = lambda *_: None
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()
    torch.nn.Module._apply = convert_weights
    torch.nn.functional.scaled_dot_product_attention = attention
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: gpu.resize(storage, size) or resize(storage, size)


@torch.no_grad()
def convert_weights(module, convert, recurse=True):
    """Module._apply for fake weights, which cannot change in place. Tied weights stay tied."""
    for child in module.children() if recurse else ():
        child._apply(convert)
    for name, weight in module._parameters.items():
        if weight is not None and not hasattr(weight, "converted"):  # by another module
            tensor = convert(weight)
            if tensor is weight:
                continue
            weight.converted = torch.nn.Parameter(tensor, weight.requires_grad)
        module._parameters[name] = getattr(weight, "converted", None)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else convert(buffer)
    return module


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's choice on CUDA: the flash kernel without a mask in 16 bits, else the memory-efficient one."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.bfloat16() for x in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)[0]
