"""Types that a KV cache may have; apart from what computes with them, so that naming is cheap."""

# What llama.cpp's -ctk and -ctv take.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
