"""From measurements to one answer: larger, stay or smaller."""
