"""Images and sounds of running sequences: encoded between steps, and put in place of their placeholder tokens.

`EncoderOutputs` keeps them for the steps, `encoder` runs the model's encoders, `placing` writes rows into the input
embeddings, and `proof` tells what a model lets these tokens see and whether their rows may be placed there. If not,
`generated` leaves the sequence to the model's own `generate`.
"""

from inflight.execution.multimodal.encoder import encodable
from inflight.execution.multimodal.encoder_outputs import BETWEEN, EncoderOutputs, EncodingError, ItemProof
from inflight.execution.multimodal.generated import GeneratedSequences

__all__ = ["BETWEEN", "EncoderOutputs", "EncodingError", "GeneratedSequences", "ItemProof", "encodable"]
