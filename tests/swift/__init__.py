"""What the Swift package in apps/ios_demo is tested with.

``make swift-test`` writes it and runs the tests.
"""
