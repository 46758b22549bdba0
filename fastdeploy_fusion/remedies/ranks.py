"""Why the ranks of a group can't use a backend together, and what ends start-up or a call."""

from .remedy import Remedy

GROUP = (
    Remedy(
        r"on another host",
        "The backend serves ranks of one host.",
        "Keep a tensor-parallel group on one host and use pipeline or data parallelism across hosts.",
    ),
    Remedy(
        r"on the same GPU",
        "Two ranks use one GPU: a kernel that waits for its peer would wait for ever.",
        "Give each rank its own GPU (`FLAGS_selected_gpus`, or `paddle.device.set_device`).",
    ),
    Remedy(
        r"does not see rank",
        "A rank can't map memory of a GPU that is hidden from it.",
        "Leave CUDA_VISIBLE_DEVICES the same on all ranks, and let each rank choose its device.",
    ),
    Remedy(
        r"no peer access",
        "The two GPUs have no path to each other's memory (no NVLink, or PCIe peer access is off).",
        "Check `nvidia-smi topo -p2p r`; turn off ACS and IOMMU for PCIe. Else the plain path serves the group.",
    ),
    Remedy(
        r"ranks: FlashInfer's kernels are built for",
        "There are kernels for 2, 4, 8 and 16 ranks only.",
        "Choose such a tensor-parallel size.",
    ),
    Remedy(
        r"dtype .*(FlashInfer's kernels take|choose one of)",
        "There is no kernel for this dtype.",
        "Use float32, bfloat16 or float16.",
    ),
    Remedy(
        r"must be a multiple of \S+ \(16 bytes|has no split into blocks",
        "The kernels can't divide a row of this length.",
        "Pad the hidden size to a multiple of 16 bytes that has a divisor fit for blocks of 1024 threads.",
    ),
    Remedy(
        r"num_max_tokens \S+: ",
        "The token limit is outside what the kernels can address.",
        "Give `--flashinfer-allreduce-fusion-max-tokens` a number within the bound in the text.",
    ),
    Remedy(
        r"all ranks must be alike|all ranks must have the same settings|Paddle is \S+ on rank",
        "Two ranks differ in a version or a setting, so they might decide differently.",
        "Start all ranks from one environment with the same flags.",
    ),
    Remedy(
        r"data-parallel attention",
        "Ranks hold different tokens, so no sum is followed by a norm of the same rows.",
        "Use `--data-parallel-size` instead of `--enable-dp-attention`.",
    ),
    Remedy(
        r"workspace is frozen",
        "CUDA graphs hold the workspace's addresses, and a later user needs a larger one.",
        "Open all users, the widest included, before graphs are captured.",
    ),
)
START_UP = (
    Remedy(
        r"MiB of GPU memory are free|shared memory needs \S+ bytes",
        "Too little memory is free for the workspace.",
        "Lower the token limit, or open the workspace before the KV cache takes the rest.",
    ),
    Remedy(
        r"self-test: ",
        "Random rows through the new workspace did not give the reference's result: this combination of driver, "
        "FlashInfer and GPU is broken. The plain path serves.",
        "Report it with the output of `fastdeploy-fusion doctor --json`; try another FlashInfer version.",
    ),
    Remedy(
        r"did not end within",
        "A start-up step hung on the rank that is named, or takes longer than its limit (kernels that are compiled).",
        "Look at that rank; raise FDFUSION_OPEN_TIMEOUT_S where it only needs longer.",
    ),
    Remedy(
        r"did not come to ",
        "A rank is alive and did not make the call that its peers are in.",
        "Look at what that rank does instead; FDFUSION_CALL_TIMEOUT_S sets the limit.",
    ),
    Remedy(
        r"died (before its chunk|during)|has closed the workspace|did not connect|can't reach|store is gone|"
        r"did not publish",
        "The rank that is named has ended, so the others can't have its share.",
        "Its own log or exit code says why; the first error of the launch is the cause.",
    ),
    Remedy(
        r"must bring the same|must make the same calls|is in '.*' while",
        "Ranks of one group made different calls.",
        "Check that no rank skips a layer, or has another batch.",
    ),
    Remedy(
        r"graph is (being )?captured",
        "A workspace can't be made inside a CUDA graph's capture.",
        "Call `AllReduceFusion.open` before the first capture.",
    ),
    Remedy(
        r"workspace is closed|is closed; open|not initialised",
        "An object was used before it was opened, or after `close()`.",
        "Open a new one.",
    ),
    Remedy(r"injected fault", "FDFUSION_FAULT is set.", "Unset it."),
    Remedy(
        r"returned nothing|failed: ",
        "A step raised on the rank that is named; its own words follow.",
        "The words after it are the cause; FDFUSION_DEBUG=1 shows tracebacks.",
    ),
)
