"""Adapters to Spark, Ray, Bytewax, Flower and Kafka; each module imports its engine when used."""
