package shm

import "sync/atomic"

// Ring carries bytes one way, from one goroutine of one process to one of the other. Who writes knows how
// much was written, who reads how much was read, and neither believes the other: what the memory says is
// only how much of the room is free again.
type Ring struct {
	taken *atomic.Uint64 // in the memory: how many bytes have been read
	waits *atomic.Uint32 // in the memory: 1 where the writer waits for room
	data  []byte

	reserved uint64 // writer's: how many bytes have found room
	at       uint64 // of this side: how many bytes have been written, or read
}

// Room reports whether n bytes have room. If not, the reader's next Take will say that the writer waits.
func (r *Ring) Room(n int) bool {
	if r.free() >= n {
		return true
	}
	r.waits.Store(1)
	return r.free() >= n // the reader may have looked ahead of the line above
}

// free returns how many bytes have room. Where the other side has written nonsense, none have.
func (r *Ring) free() int {
	used := r.reserved - r.taken.Load()
	if used > RingBytes {
		return 0
	}
	return int(RingBytes - used)
}

// Reserve takes room for n bytes, which Put is then to write, or reports that there is none, as Room does.
func (r *Ring) Reserve(n int) bool {
	if !r.Room(n) {
		return false
	}
	r.reserved += uint64(n)
	return true
}

// Put writes bytes for which there is room. The reader may take them once it has been told.
func (r *Ring) Put(b []byte) {
	n := copy(r.data[r.at%RingBytes:], b)
	copy(r.data, b[n:])
	r.at += uint64(len(b))
}

// Take fills b with the next bytes, which have been written, and reports whether the writer waits for room.
func (r *Ring) Take(b []byte) (wake bool) {
	n := copy(b, r.data[r.at%RingBytes:])
	copy(b[n:], r.data)
	r.at += uint64(len(b))
	r.taken.Store(r.at)
	return r.waits.Load() != 0 && r.waits.Swap(0) != 0
}
