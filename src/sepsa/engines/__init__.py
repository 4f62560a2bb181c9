"""Engines that people run already: Spark, Ray, Bytewax, Flower and Kafka; each module imports its engine when used."""
