# What a Python has, as lines of "tensorwire-doctor KEY VALUE". Any Python can read this, old ones too.
import signal
import sys


def say(key, value):
    text = " ".join(str(value).split())
    sys.stdout.write("tensorwire-doctor %s %s\n" % (key, text[:400]))
    sys.stdout.flush()


def why(error):
    return "%s: %s" % (type(error).__name__, error)


# It ends by itself if doctor is killed.
signal.alarm(int(sys.argv[1]))
say("python", "%d.%d.%d" % sys.version_info[:3])
say("executable", sys.executable)
try:
    import tensorwire

    say("package", tensorwire.__version__)
except ImportError as error:
    say("no-package" if getattr(error, "name", None) == "tensorwire" else "broken-package", why(error))
except Exception as error:
    say("broken-package", why(error))
try:
    import torch

    say("torch", torch.__version__)
    from torch import distributed

    if not distributed.is_available():
        say("no-backend", "this torch was built without torch.distributed")
    else:
        distributed.init_process_group("tensorwire", store=distributed.HashStore(), rank=0, world_size=1)
        distributed.destroy_process_group()
        say("backend", "tensorwire")
except ImportError as error:
    say("no-torch" if getattr(error, "name", None) == "torch" else "broken-torch", why(error))
except Exception as error:
    say("no-backend", why(error))
say("end", "")
