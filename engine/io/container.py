"""Reads any container FFmpeg knows (through PyAV): its tracks, their common clock, and frames past damaged parts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from engine.io.media import MediaError, NamelessFile, open_media_file

Track = AudioStream | VideoStream

REMEDY: Final = "convert it to WAV, FLAC, MP4 or PNG, or export it again"
CUT_SHORT_S: Final = 0.25  # containers round their durations; a loss below this is not worth a warning
# A playlist may name other files and addresses; media are read from the chosen file and from nowhere else.
OPTIONS: Final = {"protocol_whitelist": "none"}


class MediaContainer:
    """An open container; times are in seconds from the start of its earliest track. Close it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_damaged = 0
        self._file = open_media_file(path)
        try:
            self._container = av.open(NamelessFile(self._file), "r", options=OPTIONS, metadata_errors="replace")
        except av.FFmpegError as error:
            self._file.close()
            raise MediaError.about(path, "it is damaged, or it is no sound, video or picture file", REMEDY) from error
        if not self._container.streams.audio and not self._container.streams.video:
            self.close()
            raise MediaError.about(path, "it holds neither sound nor pictures, or it was cut off before them", REMEDY)
        if self._container.format.name == "tty":  # FFmpeg would draw a coloured log as moving pictures
            self.close()
            raise MediaError.about(path, "this is a text file", "choose a sound, video or picture file")
        streams = self._container.streams
        best = streams.best("audio")
        self.sound_track = best if isinstance(best, AudioStream) else None
        # The cover of an album is a picture in a sound file, not a picture track
        self.picture_track = next((s for s in streams.video if not s.disposition & Disposition.attached_pic), None)
        starts_s = [self._raw_start_s(track) for track in (self.sound_track, self.picture_track) if track is not None]
        self._zero_s = min(starts_s, default=0.0)

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._container.close()
        self._file.close()

    def start_s(self, track: Track) -> float:
        """When `track` starts."""
        return self._raw_start_s(track) - self._zero_s

    def frames(self, track: Track) -> Iterator[AudioFrame | VideoFrame]:
        """Decode `track` in presentation order; what cannot be decoded is counted in `num_damaged` and left out."""
        packets = iter(self._container.demux(track))
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:  # the container itself ends in the middle
                self.num_damaged += 1
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except av.FFmpegError:
                self.num_damaged += 1
                continue
            yield from (frame for frame in frames if isinstance(frame, AudioFrame | VideoFrame))

    def time_s(self, frame: AudioFrame | VideoFrame) -> float | None:
        """When `frame` is due; None where the container does not say."""
        if frame.pts is None or frame.time_base is None:
            return None
        return float(frame.pts * frame.time_base) - self._zero_s

    def warnings(self, track: Track, end_s: float) -> list[str]:
        """What a user should know after `track` was decoded to its end, which came at `end_s`."""
        found = []
        if self.num_damaged:
            found.append(f"{self.num_damaged} damaged parts of the {track.type} track were left out")
        promised_s = self._promised_end_s(track)
        if promised_s is not None and end_s < promised_s - CUT_SHORT_S:
            found.append(f"the {track.type} track ends at {end_s:.2f} s of {promised_s:.2f} s: the file is cut short")
        return found

    @property
    def format_name(self) -> str:
        """FFmpeg's name of the container."""
        return self._container.format.name

    @property
    def duration_s(self) -> float | None:
        """Length of the longest track as the container states it, or None where it does not."""
        duration = self._container.duration
        return None if duration is None else duration / av.time_base

    def _raw_start_s(self, track: Track) -> float:
        if track.start_time is None or track.time_base is None:
            return 0.0
        return float(track.start_time * track.time_base)

    def _promised_end_s(self, track: Track) -> float | None:
        if track.duration and track.time_base is not None:
            return self.start_s(track) + float(track.duration * track.time_base)
        # Matroska states one duration for all tracks; with a second track it may be that one's
        return self.duration_s if len(self._container.streams) == 1 else None
