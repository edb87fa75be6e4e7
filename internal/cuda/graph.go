//go:build cuda

package cuda

/*
#include "driver.h"
static inline CUresult cprun_capture_begin(CUcontext ctx, CUstream s) {
	CPRUN_IN(ctx, cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}
static inline CUresult cprun_capture_end(CUcontext ctx, CUstream s, CUgraphExec *exec) {
	CUgraph g = NULL;
	CUDA_GRAPH_INSTANTIATE_PARAMS p = {0};
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS) r = cuStreamEndCapture(s, &g);
	if (r == CUDA_SUCCESS) r = cuGraphInstantiateWithParams(exec, g, &p);
	if (g) cuGraphDestroy(g);
	return r;
}
static inline CUresult cprun_graph_launch(CUcontext ctx, CUstream s, CUgraphExec g) { CPRUN_IN(ctx, cuGraphLaunch(g, s)); }
static inline CUresult cprun_graph_free(CUcontext ctx, CUgraphExec g) { CPRUN_IN(ctx, cuGraphExecDestroy(g)); }
*/
import "C"

import "errors"

// Graph is work of a stream that is queued at once, with the arguments that it was captured with.
type Graph struct {
	dev  *Device
	exec C.CUgraphExec
}

// Capture calls queue, and makes a graph of what it queues on the stream instead of doing it.
// queue must not wait on the host, and other streams may join only by what the driver
// allows. An error of queue's, or of work that cannot be captured, poisons nothing unless queue
// does.
func (s *Stream) Capture(queue func() error) (*Graph, error) {
	if err := s.Err(); err != nil {
		return nil, err
	}
	g := &Graph{dev: s.dev}
	err := s.dev.With(func() error { // the mode wants one thread from beginning to end
		if err := s.dev.check("cuStreamBeginCapture", C.cprun_capture_begin(s.dev.ctx, s.handle)); err != nil {
			return err
		}
		err := errors.Join(queue(), s.Err())
		return errors.Join(err, s.dev.check("cuStreamEndCapture", C.cprun_capture_end(s.dev.ctx, s.handle, &g.exec)))
	})
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// LaunchGraph queues a graph of the stream's device.
func (s *Stream) LaunchGraph(g *Graph) {
	if s.failed.Load() {
		return
	}
	s.Fail(s.dev.check("cuGraphLaunch", C.cprun_graph_launch(s.dev.ctx, s.handle, g.exec)))
}

// Close frees the graph. What was launched of it goes on.
func (g *Graph) Close() error {
	if g.exec == nil {
		return nil
	}
	exec := g.exec
	g.exec = nil
	return g.dev.check("cuGraphExecDestroy", C.cprun_graph_free(g.dev.ctx, exec))
}
