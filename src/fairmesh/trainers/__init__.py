"""[trainer] Your own training code as a node: what a function gets, and adapters for other libraries.

Public as `fm.trainers`. docs/howto/own-training-code.md shows how to use it.
"""

from fairmesh.trainers.hugging_face import fit_hugging_face
from fairmesh.trainers.lightning import fit_lightning
from fairmesh.trainers.local_trainer import LocalContext, LocalTrainer, SiteData

__all__ = ["LocalContext", "LocalTrainer", "SiteData", "fit_hugging_face", "fit_lightning"]
