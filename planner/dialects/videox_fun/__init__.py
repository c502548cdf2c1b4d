"""The dialect of VideoX-Fun, EasyAnimate's successor."""
