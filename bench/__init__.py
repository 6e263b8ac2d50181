"""What measures and checks dynamotor on whole models, on GPUs and against PyTorch's operator database; no
part of the wheel.
"""
