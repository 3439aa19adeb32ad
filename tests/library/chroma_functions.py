"The embedding function of the tests of Chroma, in a module of its own so that another process can import it."

import chromadb
import cranfield
from chromadb.utils.embedding_functions import register_embedding_function


@register_embedding_function
class Stored(chromadb.EmbeddingFunction):
    "Embeddings of documents by id, of any norm, and of queries by row."

    documents = dict(zip(cranfield.DOCUMENT_IDS.tolist(), cranfield.XD * 3))

    def __init__(self):
        pass

    def __call__(self, input):
        return [self.documents[text] for text in input]

    def embed_query(self, input):
        return [cranfield.XQ[int(text)] / 2 for text in input]

    @staticmethod
    def name():
        return "cranfield"

    def get_config(self):
        return {}

    @staticmethod
    def build_from_config(config):
        return Stored()
