"""Adapters to Spark, Ray, Bytewax, Flower, Kafka and sktime; each module imports its engine when used."""
