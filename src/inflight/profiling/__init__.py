"""Measures where a decode step's time goes, and how far each part is from the roofline (`inflight profile`)."""

from inflight.profiling.decode_profile import profile_decode
from inflight.profiling.machine import Machine, MachineMeter
from inflight.profiling.step_profile import ProfilePart, StepProfile

__all__ = ["Machine", "MachineMeter", "ProfilePart", "StepProfile", "profile_decode"]
