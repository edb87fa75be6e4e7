package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

const (
	// MaxFrame is the longest frame that agents send each other.
	MaxFrame = 1 << 20
	// maxGreeting is the longest one before a peer has proven the key.
	maxGreeting = 16 << 10
	// header is the length of what stands before a frame: its length.
	header = 4
)

// Frame is a message with its length before it, made once for all who get it.
type Frame []byte

// NewFrame makes a frame of a message.
func NewFrame(message []byte) (Frame, error) {
	if len(message) > MaxFrame {
		return nil, fmt.Errorf("message of %d bytes: at most %d are allowed", len(message), MaxFrame)
	}
	f := binary.BigEndian.AppendUint32(make([]byte, 0, header+len(message)), uint32(len(message)))
	return append(f, message...), nil
}

// readFrame reads the next frame, of at most limit bytes. An empty one is a word without news.
func readFrame(r io.Reader, limit int) ([]byte, error) {
	var head [header]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > uint32(limit) {
		return nil, fmt.Errorf("frame of %d bytes: at most %d are allowed", n, limit)
	}
	message := make([]byte, n)
	if _, err := io.ReadFull(r, message); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return message, nil
}
