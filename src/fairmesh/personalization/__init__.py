"""[personalization] Models of their own for sites that need them, after the common training. `fm.personalization`."""

from fairmesh.personalization.base import OneByOne, Personalization
from fairmesh.personalization.builtin import FineTuned, Mixture
from fairmesh.personalization.choice import Choice
from fairmesh.personalization.evidence import Predictions
from fairmesh.personalization.outcome import Personalized, PersonalModel, PersonalSite

__all__ = [
    "Choice",
    "FineTuned",
    "Mixture",
    "OneByOne",
    "PersonalModel",
    "PersonalSite",
    "Personalization",
    "Personalized",
    "Predictions",
]
