"""metrics/functional"""
