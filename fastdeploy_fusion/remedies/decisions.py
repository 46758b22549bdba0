"""What the policy's reasons mean: why one call took its path."""

from ..policy import Reason

DECISIONS: dict[Reason, tuple[str, str]] = {
    Reason.FITS: ("The sum, the residual and the norm are one call of the backend.", "Nothing."),
    Reason.NO_TOKENS: ("The operand has no rows: the result is empty, and no rank waits for another.", "Nothing."),
    Reason.DISABLED: (
        "Fusion was not asked for, or the layout rules it out (data-parallel attention).",
        "Give `--enable-flashinfer-allreduce-fusion`, or `FusionConfig(enabled=True)`, on every rank.",
    ),
    Reason.ONE_RANK: ("The group has one rank: nothing is to be added up.", "Nothing."),
    Reason.UNAVAILABLE: (
        "Start-up found no fused backend for this group; the text in parentheses says why.",
        "Look that text up below. `not initialised` means that the object was made without `AllReduceFusion.open`.",
    ),
    Reason.NOT_2D: (
        "The operand is a vector, and a norm is over rows.",
        "Give `[num_tokens, hidden_size]`; leading axes may be more than one.",
    ),
    Reason.DTYPE: ("The backend has no kernel for this dtype.", "Use float32, bfloat16 or float16 activations."),
    Reason.WEIGHT_DTYPE: (
        "The kernel reads the norm's weight in the activations' dtype; another one would be misread silently.",
        "Load the norm's weight in the activations' dtype, or nothing: the sum still goes through the workspace.",
    ),
    Reason.HIDDEN_SIZE: (
        "The workspace was opened for rows of another length.",
        "Open an `AllReduceFusion` with this `hidden_size` too; the workspace is shared and grows before `freeze()`.",
    ),
    Reason.ALIGNMENT: (
        "The kernels move 16 bytes at a time, and a row is not a whole number of them.",
        "Pad the hidden size to a multiple of 8 (16-bit dtypes) or 4 (float32) elements.",
    ),
    Reason.TOKEN_LIMIT: (
        "The operand has more tokens than the fused path is worth, or was sized for. Long prompts end up here.",
        "Usually nothing: there the plain path is faster. `fastdeploy-fusion tune` measures the limit, "
        "`--flashinfer-allreduce-fusion-max-tokens` sets it, and the workspace grows with it.",
    ),
    Reason.NO_RESIDUAL: (
        "The fused kernel adds a residual, and this call has none.",
        "Give the residual, or nothing: the sum still goes through the workspace.",
    ),
    Reason.WEIGHT_BIAS: (
        "The norm multiplies by `weight + weight_bias` (Gemma), which this FlashInfer's kernel does not do.",
        "Install FlashInfer 0.6.12 or later, or nothing: the sum still goes through the workspace.",
    ),
    Reason.NOT_DETERMINISTIC: (
        "`deterministic=True`, and the backend's order of addition depends on the batch. The plain path serves, with "
        "shares gathered and added in rank order.",
        "Use `shm` (CPU), or drop the setting.",
    ),
}
"""``policy.Reason`` -> (meaning, what to do)."""
