"""Models that transformers saved in a folder: safetensors weights, labels and preprocessing.

They are image classifiers, object detectors, segmentation models, and models that compare images with texts. Nothing is
fetched, and no code in the folder is run: custom code, pickles and adapters are refused. The folder's preprocessing
settings are not trusted either. transformers' own processor preprocesses some test photos, and camserve's preprocessing
must give the same result.
"""

from camserve_server.models.huggingface.loading import check, load
from camserve_server.models.huggingface.processors import preprocess_of

__all__ = ["check", "load", "preprocess_of"]
