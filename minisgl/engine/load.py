"""Builds all that a step needs: model, KV pool, attention backends, sampler, in the order in which they depend."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from minisgl.attention.base import BackendConfig
from minisgl.attention.registry import DETERMINISTIC, check_backend, make_backend
from minisgl.core import Batch, EngineInfo, Sampling, TableUpdate
from minisgl.distributed.communicator import Communicator, RankWatch, SingleCommunicator
from minisgl.kernel.cpu import load as load_cpu_kernels
from minisgl.kvcache.device_pool import KVPool
from minisgl.models.base import CausalLM
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig
from minisgl.utils.progress import Progress

from .config import DEVICE_DEFAULTS, EngineConfig
from .memory import KVRoom, available_host_memory, context_that_fits, gib, return_freed_memory
from .model_runner import Backends, DeviceState, ModelRunner
from .sampler import Sampler
from .step_plan import plan_step

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GRAPH_RESERVE = 1 << 30  # bytes of GPU memory kept back for the CUDA graphs, which are captured last


def pick_device(config: EngineConfig) -> torch.device:
    """Raises ValueError where CUDA is asked for and there is none, or too little of it."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("There is no CUDA device that torch can use; --device cpu runs without one.")
    if config.tp_size > torch.cuda.device_count():
        raise ValueError(f"--tp {config.tp_size} needs as many GPUs; there are {torch.cuda.device_count()}.")
    return torch.device("cuda", config.tp_rank)


def pick_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """float32 on a CPU whatever is asked for, since its kernels compute in nothing else; the log says so."""
    if device.type == "cpu":
        if config.dtype not in ("auto", "float32") and config.tp_rank == 0:
            logger.warning("Half precision (%s) needs a GPU; on this CPU the model runs in float32.", config.dtype)
        return torch.float32
    name = model.torch_dtype or "bfloat16" if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ValueError(f"The model's type, {name}, cannot be computed in; choose --dtype {' or '.join(_DTYPES)}.")
    return _DTYPES[name]


def default_attention(device: torch.device) -> str:
    """The fastest that runs there."""
    if device.type == "cuda":
        return "triton"
    return "torch" if load_cpu_kernels() is None else "cpu"


def pick_attention(config: EngineConfig, device: torch.device) -> str:
    """The backend, or two as "prefill,decode". Raises ValueError where it cannot be deterministic, but should."""
    names = default_attention(device) if config.attention == "auto" else config.attention
    backends = set(names.split(","))
    for name in backends:
        check_backend(name, device.type)
    if config.deterministic:
        if len(backends) > 1 or not backends <= DETERMINISTIC:
            which = " or ".join(sorted(DETERMINISTIC))
            raise ValueError(f"--deterministic needs attention by {which}, for all steps; {names} cannot give it.")
        if device.type == "cuda" and config.tp_size > 2:
            # The library picks the order in which it adds up more than two parts by their size.
            raise ValueError(f"--deterministic works on one GPU or two, not with --tp {config.tp_size}.")
    return names


def make_sampler(vocab_size: int, max_rows: int, device: torch.device, deterministic: bool = False) -> Sampler:
    """The fastest that runs there; a sampler's module is imported when it is made."""
    if device.type == "cuda":
        from .triton_sampler import DeterministicTritonSampler, TritonSampler

        kind = DeterministicTritonSampler if deterministic else TritonSampler
        return kind(vocab_size, max_rows, device)
    kernels = load_cpu_kernels()
    if kernels is not None:
        from .cpu_sampler import CpuSampler

        return CpuSampler(kernels, vocab_size, max_rows, device)
    from .torch_sampler import TorchSampler

    return TorchSampler(vocab_size, max_rows, device)


def load(config: EngineConfig, device: torch.device, progress: Progress, watch: RankWatch | None) -> ModelRunner:
    """To be called in the thread, and on the stream, that will run the steps."""
    model_config = ModelConfig.from_path(config.model_path)
    dtype = pick_dtype(config, model_config, device)
    attention = pick_attention(config, device)
    comm = _communicator(config, device, watch)
    try:
        return _Loader(config, model_config, device, dtype, attention, comm, progress).load()
    except BaseException:
        comm.close()
        raise


def _communicator(config: EngineConfig, device: torch.device, watch: RankWatch | None) -> Communicator:
    if config.tp_size == 1:
        return SingleCommunicator()
    # torch.distributed takes its time to import.
    from minisgl.distributed.torch_communicator import make_communicator

    return make_communicator(config.tp_rank, config.tp_size, device, config.rendezvous, watch=watch)


class _Loader:
    """The choices for one rank, and what is built from them."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        comm: Communicator,
        progress: Progress,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.device, self.dtype, self.comm = device, dtype, comm
        self.attention = attention
        self.progress = progress
        defaults = DEVICE_DEFAULTS[device.type]
        self.max_running_req = config.max_running_req or defaults.max_running_req
        self.token_budget = config.token_budget or defaults.token_budget
        self.memory_ratio = config.memory_ratio or defaults.memory_ratio
        self.graphs = defaults.cuda_graph_max_bs > 0 and config.cuda_graph_max_bs != 0
        self.max_seq_len = min(model_config.max_context, config.max_seq_len or model_config.max_context)
        if config.max_seq_len is not None and config.max_seq_len > self.max_seq_len and comm.rank == 0:
            told = "The model is made for %d tokens, so that is the context, not %d."
            logger.warning(told, self.max_seq_len, config.max_seq_len)
        if config.load_format == "dummy" and comm.rank == 0:
            logger.warning("The weights are random numbers (--load-format dummy), and so is what the model says.")

    def load(self) -> ModelRunner:
        model = self._model()
        backends = self._backends(model)
        deterministic = self.config.deterministic
        sampler = make_sampler(self.model_config.vocab_size, self.max_running_req, self.device, deterministic)

        def runner(num_pages: int, max_seq_len: int) -> ModelRunner:
            info = EngineInfo(
                num_pages=num_pages,
                page_size=self.config.page_size,
                max_running_req=self.max_running_req,
                max_seq_len=max_seq_len,
                vocab_size=self.model_config.vocab_size,
                token_budget=self.token_budget,
            )
            state = DeviceState(self.max_running_req, self._pages_of(max_seq_len), self._kv_pool(model, num_pages))
            return ModelRunner(model, state, backends, sampler, self.comm, info)

        self.progress("making room for the KV cache", None)
        if self.device.type == "cuda":
            free, share = self._gpu_memory(runner(0, self.max_seq_len))
        else:
            free = available_host_memory() // self.config.tp_size
            share = int(free * self.memory_ratio)
        num_pages = self._num_pages(model, free, share)
        context = context_that_fits(self.max_seq_len, num_pages, self.config.page_size)
        result = runner(num_pages, context)
        # The first step is slow (thread pools, kernels that are made on first use), so it is not a client's.
        run_padding(result, requests=1, tokens=min(2, context))
        return_freed_memory()
        return result

    def _model(self) -> CausalLM:
        loaded = 0

        def weights(done: int, total: int) -> None:
            nonlocal loaded
            loaded = done
            self.progress("loading weights", done / max(total, 1))

        begin = time.perf_counter()
        model = build_model(
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            path=self.config.model_path,
            comm=self.comm,
            load=self.config.load_format,
            max_positions=self.max_seq_len,
            deterministic=self.config.deterministic,
            progress=weights,
        )
        seconds = time.perf_counter() - begin
        if self.comm.rank == 0 and self.config.load_format != "dummy":
            rate = gib(int(loaded / max(seconds, 1e-9)))
            logger.info("Weights: %s of tensors read in %.1f s, %s a second.", gib(loaded), seconds, rate)
        return model

    def _backends(self, model: CausalLM) -> Backends:
        config = BackendConfig(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=self.model_config.head_dim,
            page_size=self.config.page_size,
            max_running_req=self.max_running_req,
            token_budget=self.token_budget,
            dtype=self.dtype,
            device=self.device,
            deterministic=self.config.deterministic,
        )
        if self.comm.rank == 0:
            why = "the default here" if self.config.attention == "auto" else "as asked for"
            logger.info("Attention: %s, %s.", self.attention, why)
        prefill, _, decode = self.attention.partition(",")
        first = make_backend(prefill, config, model.context.ops)
        same = decode in ("", prefill)
        return Backends(first, first if same else make_backend(decode, config, model.context.ops))

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _kv_pool(self, model: CausalLM, num_pages: int) -> KVPool:
        return KVPool(
            self.model_config.num_layers,
            num_pages,
            self.config.page_size,
            model.num_kv_heads,
            self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _num_pages(self, model: CausalLM, free: int, share: int) -> int:
        room = KVRoom(
            free=free,
            share=share,
            page_bytes=KVPool.bytes_per_page(
                self.model_config.num_layers,
                self.config.page_size,
                model.num_kv_heads,
                self.model_config.head_dim,
                self.dtype,
            ),
            page_size=self.config.page_size,
            max_seq_len=self.max_seq_len,
            max_running_req=self.max_running_req,
        )

        def smallest_of_ranks(pages: int) -> int:
            return int(self.comm.all_gather(torch.tensor([pages], device=self.device)).min())

        return room.num_pages(self.config.num_pages, smallest_of_ranks)

    def _gpu_memory(self, runner: ModelRunner) -> tuple[int, int]:
        """Bytes free for the KV cache, and how many of them its share are.

        ``runner`` has no KV cache yet. It runs the largest step there can be, which shows what activations need beside.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        requests = min(self.max_running_req, self.token_budget)
        tokens = min(self.token_budget, requests * self.max_seq_len)
        run_padding(runner, requests, tokens)
        torch.cuda.synchronize(self.device)
        activations = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        free -= activations + (_GRAPH_RESERVE if self.graphs else 0)
        share = free - int(total * (1 - self.memory_ratio))
        if self.comm.rank == 0:
            logger.info(
                "GPU memory: %s for weights, %s for activations, %s for the KV cache.",
                gib(before),
                gib(activations),
                gib(max(0, share)),
            )
        return free, share


def run_padding(runner: ModelRunner, requests: int, tokens: int) -> None:
    """A step of ``tokens`` tokens that leaves no trace: all its requests are the scratch row.

    They sample with top-p, which takes the most memory.
    """
    new = np.full(requests, tokens // requests, np.int32)
    new[requests - tokens % requests :] += 1
    none, ones = np.zeros(0, np.int32), np.ones(requests, np.float32)
    rows = np.full(requests, runner.info.max_running_req, np.int32)
    batch = Batch(
        rows=rows,
        cached=np.zeros(requests, np.int32),
        new=new,
        input_ids=np.zeros(tokens, np.int32),
        table=TableUpdate(none, none, none),
        sampling=Sampling(
            index=np.arange(requests, dtype=np.int32),
            temperature=ones,
            top_k=np.zeros(requests, np.int32),
            top_p=ones * np.float32(0.9),
            min_p=ones * 0,
            uniform=ones * 0,
        ),
    )
    plan = plan_step(batch, runner.state.page_table.shape[1])
    tensors = {name: torch.from_numpy(array).to(runner.state.page_table.device) for name, array in plan.arrays.items()}
    runner.step(plan, tensors)
