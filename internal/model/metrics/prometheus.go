package metrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
)

// These bounds limit foreign requests. A scrape is one short request on its own connection, and a run needs its
// descriptors; the kernel queues connections beyond maxScrapes.
const (
	maxScrapes   = 16
	requestTime  = 5 * time.Second // to read a request, and to write the answer
	maxRequest   = 8 << 10         // bytes of the header
	shutdownTime = 2 * time.Second // for a running scrape at the end of the run
)

// Prometheus serves the last step's values at /metrics. Its own registry has only the values listed in docs/formats.md.
type Prometheus struct {
	gauges                  []prometheus.Gauge // of measured
	validation              prometheus.Gauge   // keeps its value between validations
	sources                 *prometheus.GaugeVec
	steps, tokens, commWait prometheus.Counter
	seen                    int64 // tokens counted so far
	step                    int64 // the last step in the counters

	server *http.Server
	addr   net.Addr
	served chan error // the end of Serve
}

// ServePrometheus listens on "host:port" and serves until Close. ":port" and "port" listen on the loopback interface
// only, since the endpoint has no access control; name a host (0.0.0.0 for all) for access from outside. Port 0 selects
// a free one, which Addr returns.
//
// The counters of this process begin after step resumed.
func ServePrometheus(address string, resumed int64) (*Prometheus, error) {
	l, err := listen(address)
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	p := newPrometheus(registry)
	p.step = resumed
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	p.server = &http.Server{
		Handler: mux, ReadTimeout: requestTime, WriteTimeout: requestTime, MaxHeaderBytes: maxRequest,
		ErrorLog: log.New(io.Discard, "", 0), // clients must not write to a run's log
	}
	p.server.SetKeepAlivesEnabled(false)
	p.addr = l.Addr()
	p.served = make(chan error, 1)
	go func() { p.served <- p.server.Serve(netutil.LimitListener(l, maxScrapes)) }()
	return p, nil
}

// CheckPrometheus returns the error that ServePrometheus would return.
func CheckPrometheus(address string) error {
	l, err := listen(address)
	if err == nil {
		err = l.Close()
	}
	return err
}

func listen(address string) (net.Listener, error) {
	if !strings.Contains(address, ":") {
		address = ":" + address
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("log.prometheus %q: %w; write host:port", address, err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	if err != nil {
		return nil, fmt.Errorf("log.prometheus %q: %w; choose another port, or \"\" for none", address, err)
	}
	return l, nil
}

func newPrometheus(r *prometheus.Registry) *Prometheus {
	p := &Prometheus{}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		r.MustRegister(c)
		return c
	}
	p.steps = counter("cprun_steps_total", "Optimizer steps done by this process.")
	p.tokens = counter("cprun_tokens_total", "Tokens trained on, over all ranks and across resumes.")
	p.commWait = counter("cprun_comm_wait_seconds_total",
		"Time that compute stood waiting for transfers, on the slowest rank.")
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		g.Set(float64(Absent)) // before the first step
		r.MustRegister(g)
		return g
	}
	for _, m := range measured(Step{}) {
		p.gauges = append(p.gauges, gauge(m.name, m.help))
	}
	p.validation = gauge("cprun_validation_loss", "Last validation loss, in nats; NaN before the first.")
	p.sources = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "cprun_source_validation_loss",
		Help: "Last validation loss of each source, if there are several."}, []string{"source"})
	r.MustRegister(p.sources)
	return p
}

type measure struct {
	name, help string
	value      Float
}

func measured(s Step) []measure {
	return []measure{
		{"cprun_step", "Last optimizer step.", Float(s.Step)},
		{"cprun_loss", "Mean loss of the step's valid target tokens, in nats.", s.Loss},
		{"cprun_grad_norm", "Global gradient norm before clipping.", s.GradNorm},
		{"cprun_learning_rate", "Learning rate.", s.LR},
		{"cprun_step_seconds", "Duration of the step.", s.StepSeconds},
		{"cprun_tokens_per_second", "Tokens per second over all ranks.", s.TokensPerSecond},
		{"cprun_tokens_per_second_per_device", "Tokens per second and device.", s.TokensPerSecondPerDevice},
		{"cprun_tflops_per_device", "Model TFLOP/s per device.", s.TFLOPsPerDevice},
		{"cprun_mfu_ratio", "Model FLOP/s over the device's peak, 0 to 1; NaN where the peak is not known.", s.MFU},
		{"cprun_memory_bytes", "Peak memory of the device that uses most.", Float(s.MemoryBytes)},
	}
}

// Addr returns the served address.
func (p *Prometheus) Addr() string { return p.addr.String() }

// Write sets the values for the next scrape.
func (p *Prometheus) Write(s Step) error {
	for i, m := range measured(s) {
		p.gauges[i].Set(float64(m.value))
	}
	if s.ValLoss != nil {
		p.validation.Set(float64(*s.ValLoss))
	}
	for name, loss := range s.ValLosses {
		p.sources.WithLabelValues(strings.ToValidUTF8(name, "?")).Set(float64(loss))
	}
	// Not every step is logged, so a line represents all steps since the previous one.
	steps := float64(max(s.Step-p.step, 0))
	p.step = s.Step
	p.steps.Add(steps)
	if s.Tokens > p.seen {
		p.tokens.Add(float64(s.Tokens - p.seen))
		p.seen = s.Tokens
	}
	if s.CommWaitSeconds > 0 {
		p.commWait.Add(steps * float64(s.CommWaitSeconds))
	}
	return nil
}

// Sync does nothing: there is no file.
func (p *Prometheus) Sync() error { return nil }

// Close stops the server after a running scrape. It cuts other connections.
func (p *Prometheus) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	err := p.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = p.server.Close()
	}
	if err != nil {
		err = fmt.Errorf("metrics server shutdown: %w", err)
	}
	if serve := <-p.served; !errors.Is(serve, http.ErrServerClosed) {
		err = errors.Join(err, fmt.Errorf("metrics server: %w", serve))
	}
	return err
}
