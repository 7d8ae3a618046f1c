"""An encoder whose attributions leave nothing over: e(x) - e(r), the embedding less that of its reference.

Moeller et al. (2024) fine-tune such an encoder on cosines and find it as accurate as one that is not shifted.
Put `ShiftedEncoder` where a SentenceTransformer has its Transformer:

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    transformer = ShiftedEncoder("sentence-transformers/all-MiniLM-L6-v2")
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())])

It trains, saves and loads like any other; loading takes `SentenceTransformer(folder, trust_remote_code=True)`, since
the module is not sentence-transformers' own. `ij-exact` then explains its own cosine exactly, up to the quadrature
error that is reported. See examples/train_exact_model.py.
"""

from typing import Any

from sentence_transformers.base.modules.transformer import Transformer

from rag_explain.encoder.reference import IN_REFERENCE, reference_features, setting


class ShiftedEncoder(Transformer):
    """A Transformer that subtracts from every token's vector the one it would have if nothing were said.

    Pooling that is linear in the token vectors (mean, CLS, last token, weighted mean) turns that into e(x) - e(r)
    exactly. `ij-exact` refuses what does not, such as max pooling or a bias after it: the reference must give zero.
    """

    is_shifted = True

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The features with `token_embeddings` (D, n, h) shifted."""
        with setting(IN_REFERENCE, True):
            reference = super().forward(reference_features(features, self), **kwargs)
        output: dict[str, Any] = super().forward(features, **kwargs)
        output["token_embeddings"] = output["token_embeddings"] - reference["token_embeddings"]
        return output
