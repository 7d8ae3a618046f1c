"""What is refused before a model is explained: what its own text lengths would change."""

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer
from rag_explain.errors import UnsupportedModel
from tests.support.models import CORPUS, tokenizer

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SEQUENCES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


@pytest.fixture(params=["BigBird", "BigBirdPegasus"])
def sparse(request, tmp_path):
    """A model whose attention is full up to 28 tokens, and sparse beyond that until it has seen a shorter text."""
    words = tokenizer("wordpiece")
    sizes = BERT if request.param == "BigBird" else SEQUENCES | HEADS
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        **sizes, vocab_size=len(words), pad_token_id=0, max_position_embeddings=512, block_size=4, num_random_blocks=1
    )
    getattr(transformers, f"{request.param}Model")(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    return tmp_path


def test_attention_that_depends_on_the_length_is_refused_with_what_to_load_instead(sparse):
    with pytest.raises(UnsupportedModel, match=r"load it with config_kwargs={'attention_type': 'original_full'}"):
        Explainer(SentenceTransformer(str(sparse), device="cpu"))


@pytest.mark.parametrize("sparse", ["BigBird"], indirect=True)
def test_what_is_to_be_loaded_instead_is_explained_as_it_encodes(sparse):
    model = SentenceTransformer(str(sparse), device="cpu", config_kwargs={"attention_type": "original_full"}).double()
    query, document = CORPUS[0], " ".join(CORPUS)
    true = float(model.similarity(model.encode_query(query), model.encode_document(document)))
    explanation = Explainer(model).explain(query, document)
    # `similarity` gives float32 numbers.
    assert explanation.score == pytest.approx(true, abs=1e-7)
    assert explanation.gap == pytest.approx(0, abs=1e-6)
