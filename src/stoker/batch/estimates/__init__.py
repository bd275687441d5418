"""Estimates that build up over a training's updates."""
