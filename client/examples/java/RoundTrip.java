import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import io.grpc.CallCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.StreamObserver;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import spectrumkv.v1.PolicyOuterClass.Allocator;
import spectrumkv.v1.PolicyOuterClass.Policy;
import spectrumkv.v1.Report.TransferReport;
import spectrumkv.v1.Report.TransferState;
import spectrumkv.v1.Schema.*;
import spectrumkv.v1.WorkerServiceGrpc;
import spectrumkv.v1.WorkerServiceGrpc.WorkerServiceBlockingStub;
import spectrumkv.v1.WorkerServiceGrpc.WorkerServiceStub;
import spectrumkv.v1.WorkerServiceOuterClass.*;

/**
 * A prefill worker and a decode worker in Java, over gRPC alone: their KV caches lie in the daemons' memory.
 *
 * <p>RoundTrip PREFILL_WORKER_HOST:PORT DECODE_WORKER_HOST:PORT DECODE_PEER_HOST:PORT PREFILL_TOKEN_FILE
 * DECODE_TOKEN_FILE; how it is built: README.md.
 */
public final class RoundTrip {
  // The model: float16, one K and one V of [block, token, head, dim] per layer.
  static final int LAYERS = 3, HEADS = 2, HEAD_DIM = 64, BLOCK_TOKENS = 16, BLOCKS = 12, TOKENS = 40;
  static final int TOKEN_BYTES = HEADS * HEAD_DIM * 2;
  static final int BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES;
  static final int TENSOR_BYTES = BLOCKS * BLOCK_BYTES;
  static final Plane[] PLANES = {Plane.PLANE_K, Plane.PLANE_V};

  /** A tensor's block, by its place in the order of tokens. */
  record Place(int layer, Plane plane, int place) {}

  /** "authorization: Bearer TOKEN" on every call, as worker.tcp_address wants it. */
  static final class Bearer extends CallCredentials {
    private final String value;

    Bearer(String tokenFile) throws Exception {
      value = "Bearer " + Files.readString(Path.of(tokenFile)).stripTrailing();
    }

    @Override
    public void applyRequestMetadata(RequestInfo info, Executor executor, MetadataApplier applier) {
      Metadata metadata = new Metadata();
      metadata.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), value);
      applier.apply(metadata);
    }

    @Override
    public void thisUsesUnstableApi() {}
  }

  /** A connection to a daemon, and a pool there that a stream of pings holds. */
  static final class Worker {
    final ManagedChannel channel;
    final WorkerServiceStub streaming;
    final WorkerServiceBlockingStub unlimited;
    final PoolRef pool;
    final ScheduledExecutorService pings = Executors.newSingleThreadScheduledExecutor();

    Worker(String address, String tokenFile, String requestId) throws Exception {
      channel = NettyChannelBuilder.forTarget(address).usePlaintext().build();
      unlimited = WorkerServiceGrpc.newBlockingStub(channel).withCallCredentials(new Bearer(tokenFile));
      streaming = WorkerServiceGrpc.newStub(channel).withCallCredentials(new Bearer(tokenFile));
      RegisterPoolRequest request =
          RegisterPoolRequest.newBuilder().setRequestId(requestId).setSchema(schema()).build();
      RegisterPoolResponse answer = calls().registerPool(request);
      pool = answer.getPool();
      // The daemon lets go of the pool as soon as this stream breaks. A ping every third of the lease.
      StreamObserver<HoldPoolRequest> hold = streaming.holdPool(new Discard<HoldPoolResponse>());
      HoldPoolRequest ping = HoldPoolRequest.newBuilder().setPool(pool).build();
      pings.scheduleAtFixedRate(() -> hold.onNext(ping), 0, answer.getLeaseTtlMs() / 3, TimeUnit.MILLISECONDS);
    }

    WorkerServiceBlockingStub calls() {
      return unlimited.withDeadlineAfter(30, TimeUnit.SECONDS);
    }

    void stop() throws Exception {
      calls().unregisterPool(UnregisterPoolRequest.newBuilder().setPool(pool).build());
      pings.shutdownNow();
      channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
    }

    /** Writes each block at the place it has in the request's block table. */
    void put(long[] table, Map<Place, byte[]> cache) throws Exception {
      CompletableFuture<PutBlocksResponse> done = new CompletableFuture<>();
      StreamObserver<PutBlocksRequest> stream = streaming.withDeadlineAfter(30, TimeUnit.SECONDS).putBlocks(
          new Discard<PutBlocksResponse>() {
            @Override
            public void onNext(PutBlocksResponse response) {
              done.complete(response);
            }

            @Override
            public void onError(Throwable error) {
              done.completeExceptionally(error);
            }
          });
      stream.onNext(PutBlocksRequest.newBuilder().setPool(pool).build()); // in the first message
      for (Map.Entry<Place, byte[]> entry : cache.entrySet()) {
        Place at = entry.getKey();
        BlockData block = BlockData.newBuilder().setLayer(at.layer()).setPlane(at.plane()).setBlock(table[at.place()])
            .setData(ByteString.copyFrom(entry.getValue())).build();
        stream.onNext(PutBlocksRequest.newBuilder().addBlocks(block).build());
      }
      stream.onCompleted();
      done.get(30, TimeUnit.SECONDS);
    }

    Map<Place, byte[]> get(long[] table) {
      Map<Long, Integer> places = new HashMap<>();
      for (int place = 0; place < table.length; ++place) places.put(table[place], place);
      Map<Place, byte[]> cache = new HashMap<>();
      GetBlocksRequest request =
          GetBlocksRequest.newBuilder().setPool(pool).addAllRuns(runs(table).getRunsList()).build();
      for (Iterator<GetBlocksResponse> messages = calls().getBlocks(request); messages.hasNext();) {
        for (BlockData block : messages.next().getBlocksList()) {
          Place at = new Place(block.getLayer(), block.getPlane(), places.get(block.getBlock()));
          cache.put(at, block.getData().toByteArray());
        }
      }
      return cache;
    }

    /** Watches the transfer to its end; the report of one that committed. */
    TransferReport await(String id) {
      TransferKey key = TransferKey.newBuilder().setTransferId(id).build();
      Iterator<WatchTransferResponse> events =
          calls().watchTransfer(WatchTransferRequest.newBuilder().setTransfer(key).build());
      while (events.hasNext()) {
        WatchTransferResponse event = events.next();
        if (event.hasLayersReady()) System.out.println("layers ready: " + event.getLayersReady().getLayers());
        if (!event.hasTerminal()) continue;
        TransferReport report = event.getTerminal();
        if (report.getState() == TransferState.TRANSFER_STATE_COMMITTED) return report;
        throw new IllegalStateException(report.getState() + " " + report.getReason() + ": " + report.getMessage());
      }
      throw new IllegalStateException("the watch ended without a last event");
    }
  }

  static class Discard<T> implements StreamObserver<T> {
    @Override
    public void onNext(T message) {}

    @Override
    public void onError(Throwable error) {}

    @Override
    public void onCompleted() {}
  }

  static TensorView tensor(long index) {
    return TensorView.newBuilder().setOffsetBytes(index * TENSOR_BYTES).setBlockStrideBytes(BLOCK_BYTES)
        .setTokenStrideBytes(TOKEN_BYTES).setHeadStrideBytes(HEAD_DIM * 2).setDimStrideBytes(2).build();
  }

  /** Where each tensor lies: K and V of layer 0, of layer 1, ... one after the other. */
  static PoolSchema schema() {
    LayerGroup.Builder group = LayerGroup.newBuilder().setKind(GroupKind.GROUP_KIND_ATTENTION)
        .setDataType(DataType.DATA_TYPE_FLOAT16).setHeadsTotal(HEADS).setHeadCount(HEADS).setHeadDim(HEAD_DIM)
        .setBlockTokens(BLOCK_TOKENS).setNumBlocks(BLOCKS);
    for (int layer = 0; layer < LAYERS; ++layer) {
      group.addLayers(
          LayerTensors.newBuilder().setLayer(layer).setK(tensor(2 * layer)).setV(tensor(2 * layer + 1)));
    }
    DaemonOwnedSegment memory = DaemonOwnedSegment.newBuilder().setSizeBytes(LAYERS * 2L * TENSOR_BYTES).build();
    return PoolSchema.newBuilder().setModel("example").setTensorParallelSize(1).addGroups(group)
        .addSegments(MemorySegment.newBuilder().setDaemonOwned(memory)).build();
  }

  static GroupBlocks runs(long[] table) {
    GroupBlocks.Builder group = GroupBlocks.newBuilder();
    for (long block : table) group.addRuns(BlockRun.newBuilder().setFirst(block).setCount(1));
    return group.build();
  }

  /** What tokens of the request have of a block: behind them the destination's last block is zero. */
  static byte[] tokensOf(int place, byte[] data) {
    return Arrays.copyOf(data, Math.min(TOKENS - place * BLOCK_TOKENS, BLOCK_TOKENS) * TOKEN_BYTES);
  }

  static void roundTrip(Worker prefill, Worker decode, String peer) throws Exception {
    String id = "java-" + ProcessHandle.current().pid();
    long[] source = {7, 2, 9}, destination = {0, 5, 3}; // block tables, in the order of tokens
    SecureRandom random = new SecureRandom();
    Map<Place, byte[]> cache = new HashMap<>();
    for (int layer = 0; layer < LAYERS; ++layer) {
      for (Plane plane : PLANES) {
        for (int place = 0; place < source.length; ++place) {
          byte[] data = new byte[BLOCK_BYTES]; // any bits: RAW carries them as they are
          random.nextBytes(data);
          cache.put(new Place(layer, plane, place), data);
        }
      }
    }
    prefill.put(source, cache);
    decode.calls().expect(ExpectRequest.newBuilder().setTransferId(id).setPool(decode.pool).setTokenCount(TOKENS)
        .addBlocks(runs(destination)).build());
    prefill.calls().send(SendRequest.newBuilder().setTransferId(id).setPeer(peer).setPool(prefill.pool)
        .setTokenCount(TOKENS).addBlocks(runs(source))
        .setPolicy(Policy.newBuilder().setAllocator(Allocator.ALLOCATOR_RAW)).build());
    TransferReport report = decode.await(id);
    System.out.printf("committed: %d KV bytes, %d on the wire%n", report.getKvBytes(), report.getWireBytes());
    Map<Place, byte[]> landed = decode.get(destination);
    if (landed.size() != cache.size()) {
      throw new IllegalStateException(landed.size() + " blocks came back, not " + cache.size());
    }
    for (Map.Entry<Place, byte[]> entry : cache.entrySet()) {
      Place at = entry.getKey();
      if (!Arrays.equals(tokensOf(at.place(), landed.get(at)), tokensOf(at.place(), entry.getValue()))) {
        throw new IllegalStateException(at + " differs");
      }
    }
    System.out.println("every value arrived");
  }

  /** Code, reason and offending values of an error of the daemon. */
  static String explain(StatusRuntimeException error) throws Exception {
    StringBuilder words = new StringBuilder(error.getStatus().getCode().name());
    com.google.rpc.Status status = io.grpc.protobuf.StatusProto.fromThrowable(error);
    for (Any detail : status == null ? List.<Any>of() : status.getDetailsList()) {
      if (!detail.is(ErrorInfo.class)) continue;
      ErrorInfo info = detail.unpack(ErrorInfo.class);
      words.append(' ').append(info.getReason());
      new TreeMap<>(info.getMetadataMap()).forEach((name, value) -> words.append(" " + name + "=" + value));
    }
    return words + ": " + error.getStatus().getDescription();
  }

  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 5) {
      System.err.println("usage: RoundTrip PREFILL_WORKER_HOST:PORT DECODE_WORKER_HOST:PORT DECODE_PEER_HOST:PORT "
          + "PREFILL_TOKEN_FILE DECODE_TOKEN_FILE");
      System.exit(2);
    }
    int status = 1;
    try {
      String id = "java-" + ProcessHandle.current().pid();
      Worker prefill = new Worker(arguments[0], arguments[3], id + "-prefill");
      Worker decode = new Worker(arguments[1], arguments[4], id + "-decode");
      roundTrip(prefill, decode, arguments[2]);
      TransferKey nobody = TransferKey.newBuilder().setTransferId("nobody").build();
      try {
        decode.calls().getTransfer(GetTransferRequest.newBuilder().setTransfer(nobody).build());
      } catch (StatusRuntimeException error) {
        System.out.println("refused: " + explain(error));
      }
      prefill.stop();
      decode.stop();
      status = 0;
    } catch (StatusRuntimeException error) {
      System.err.println("RoundTrip: " + explain(error));
    } catch (Exception error) {
      System.err.println("RoundTrip: " + error);
    }
    System.exit(status); // whatever threads gRPC still has
  }
}
