package gossip

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	sealKey  = 32 // bytes of the key that seals packets, for AES-256
	sealCost = 28 // bytes of a nonce and a tag
	// packetSize exceeds the longest packet (1,400 bytes).
	packetSize = 1500
)

// A transport carries memberlist's packets, sealed, and streams. memberlist's own encryption is off: it does not
// authenticate the version of a packet's encryption, and a replayed packet with another version would crash it.
type transport struct {
	conn    net.PacketConn
	seal    cipher.AEAD
	label   string // of the job, on streams and in packets
	dial    func(ctx context.Context, addr string) (net.Conn, error)
	packets chan *memberlist.Packet
	streams chan net.Conn
	ctx     context.Context // ended by Shutdown
	stop    context.CancelFunc
	wait    sync.WaitGroup
}

func newTransport(c *Config) (*transport, error) {
	key, err := hkdf.Key(sha256.New, c.Key, nil, "cprun gossip packets\x00"+c.Job, sealKey)
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	seal, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	job := sha256.Sum256([]byte(c.Job))
	t := &transport{
		conn: c.Packets, seal: seal, dial: c.Dial, label: hex.EncodeToString(job[:8]),
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn),
	}
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.wait.Go(t.listen)
	return t, nil
}

// listen opens the job's packets, and drops others.
func (t *transport) listen() {
	buf := make([]byte, packetSize)
	for {
		n, from, err := t.conn.ReadFrom(buf) // another error may come from an earlier packet
		if errors.Is(err, net.ErrClosed) {
			return
		}
		packet, err := t.seal.Open(nil, nil, buf[:n], nil)
		if err != nil {
			continue
		}
		select {
		case t.packets <- &memberlist.Packet{Buf: packet, From: from, Timestamp: time.Now()}:
		case <-t.ctx.Done():
		}
	}
}

// WriteTo sends a packet.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err == nil {
		_, err = t.conn.WriteTo(t.seal.Seal(nil, nil, b, nil), net.UDPAddrFromAddrPort(to))
	}
	return time.Now(), err
}

// DialTimeout opens a stream.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	ctx, stop := context.WithTimeout(t.ctx, timeout)
	defer stop()
	conn, err := t.dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return stream{conn}, nil
}

// A stream closes itself after a failed write: memberlist 0.7.0 drops a stream to which it cannot write the label.
type stream struct{ net.Conn }

func (s stream) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	if err != nil {
		s.Close()
	}
	return n, err
}

// PacketCh returns the received packets.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh returns the accepted streams.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// FinalAdvertiseAddr returns the address of the socket.
func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	at := t.conn.LocalAddr().(*net.UDPAddr)
	return at.IP, at.Port, nil
}

// Shutdown ends packets and streams.
func (t *transport) Shutdown() error {
	t.stop()
	err := t.conn.Close()
	t.wait.Wait()
	return err
}
