"""Images and sounds of running sequences: encoded between steps, and put in place of their placeholder tokens.

`EncoderOutputs` keeps them for the steps, `encoder` runs the model's encoders, and `placing` writes rows into the input
embeddings. `item_proofs` tells what a model lets these tokens see, and whether their rows may be placed there; if not,
`generated` leaves the sequence to the model's own `generate`.
"""

from inflight.execution.multimodal.encoder import encodable
from inflight.execution.multimodal.encoder_outputs import EncoderOutputs, EncodingError
from inflight.execution.multimodal.generated import GeneratedSequences
from inflight.execution.multimodal.item_proofs import BETWEEN, ItemProof

__all__ = ["BETWEEN", "EncoderOutputs", "EncodingError", "GeneratedSequences", "ItemProof", "encodable"]
