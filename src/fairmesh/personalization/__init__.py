"""[personalization] Models of their own for sites that need them, without any communication. `fm.personalization`."""

from fairmesh.personalization.base import Personalization
from fairmesh.personalization.builtin import FineTuned, Mixture
from fairmesh.personalization.evidence import HeldOutPredictions
from fairmesh.personalization.outcome import Personalized, PersonalModel, PersonalSite

__all__ = [
    "FineTuned",
    "HeldOutPredictions",
    "Mixture",
    "PersonalModel",
    "PersonalSite",
    "Personalization",
    "Personalized",
]
