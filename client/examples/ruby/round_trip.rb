# A prefill worker and a decode worker in Ruby, over gRPC alone: their KV caches lie in the daemons' memory.
#
#   round_trip.rb PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT
#
# How it is run: README.md. The addresses that scripts/demo --keep prints serve.
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'
require 'grpc'
require 'securerandom'
require 'spectrumkv/v1/worker_service_services_pb'
require 'timeout'

include Spectrumkv::V1

# The model: float16, one K and one V of [block, token, head, dim] per layer.
LAYERS, HEADS, HEAD_DIM = 3, 2, 64
BLOCK_TOKENS, BLOCKS, TOKENS = 16, 12, 40
TOKEN_BYTES = HEADS * HEAD_DIM * 2
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
TENSOR_BYTES = BLOCKS * BLOCK_BYTES
PLANES = [:PLANE_K, :PLANE_V].freeze

# Where each tensor lies: K and V of layer 0, of layer 1, ... one after the other.
def schema
  tensor = lambda do |index|
    TensorView.new(offset_bytes: index * TENSOR_BYTES, block_stride_bytes: BLOCK_BYTES,
                   token_stride_bytes: TOKEN_BYTES, head_stride_bytes: HEAD_DIM * 2, dim_stride_bytes: 2)
  end
  layers = (0...LAYERS).map { |i| LayerTensors.new(layer: i, k: tensor.(2 * i), v: tensor.(2 * i + 1)) }
  group = LayerGroup.new(kind: :GROUP_KIND_ATTENTION, data_type: :DATA_TYPE_FLOAT16, heads_total: HEADS,
                         head_count: HEADS, head_dim: HEAD_DIM, block_tokens: BLOCK_TOKENS, num_blocks: BLOCKS,
                         layers: layers)
  memory = MemorySegment.new(daemon_owned: DaemonOwnedSegment.new(size_bytes: LAYERS * 2 * TENSOR_BYTES))
  PoolSchema.new(model: 'example', tensor_parallel_size: 1, groups: [group], segments: [memory])
end

# A connection to a daemon, and a pool there that a stream of pings holds.
class Worker
  attr_reader :stub, :pool

  def initialize(socket, request_id)
    @stub = WorkerService::Stub.new("unix:#{socket}", :this_channel_is_insecure, timeout: 30)
    answer = @stub.register_pool(RegisterPoolRequest.new(request_id: request_id, schema: schema))
    @pool = answer.pool
    hold(answer.lease_ttl_ms / 3000.0)
  end

  # The daemon lets go of the pool as soon as this stream breaks. A ping every third of the lease, until let_go.
  def hold(period)
    @let_go = Queue.new
    pings = Enumerator.new do |ping|
      loop do
        ping << HoldPoolRequest.new(pool: @pool)
        break if Timeout.timeout(period) { @let_go.pop }
      rescue Timeout::Error
        next
      end
    end
    @holder = Thread.new { @stub.hold_pool(pings, deadline: GRPC::Core::TimeConsts::INFINITE_FUTURE).each { |_| } }
  end

  def stop
    @stub.unregister_pool(UnregisterPoolRequest.new(pool: @pool))
    @let_go << true
    @holder.join
  end

  # cache: [layer, plane, place] => bytes; each goes to the block that has its place in the request's block table.
  def put(table, cache)
    messages = cache.map do |(layer, plane, place), data|
      PutBlocksRequest.new(blocks: [BlockData.new(layer: layer, plane: plane, block: table[place], data: data)])
    end
    messages.first.pool = @pool
    @stub.put_blocks(messages)
  end

  def get(table)
    request = GetBlocksRequest.new(pool: @pool, runs: table.map { |block| BlockRun.new(first: block, count: 1) })
    @stub.get_blocks(request).flat_map(&:blocks).to_h do |block|
      [[block.layer, block.plane, table.index(block.block)], block.data]
    end
  end

  # Watches the transfer to its end; the report of one that committed.
  def wait(id)
    @stub.watch_transfer(WatchTransferRequest.new(transfer: TransferKey.new(transfer_id: id))).each do |event|
      puts "layers ready: #{event.layers_ready.layers}" if event.layers_ready
      next unless event.terminal
      return event.terminal if event.terminal.state == :TRANSFER_STATE_COMMITTED
      raise "#{event.terminal.state} #{event.terminal.reason}: #{event.terminal.message}"
    end
    raise 'the watch ended without a last event'
  end
end

# Code, reason and offending values of an error of the daemon.
def explain(error)
  details = error.to_rpc_status&.details || []
  any = details.find { |detail| detail.type_url.end_with?('/google.rpc.ErrorInfo') }
  info = any && Google::Rpc::ErrorInfo.decode(any.value)
  code = GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == error.code }
  values = info ? info.metadata.to_h.sort.map { |name, value| " #{name}=#{value}" }.join : ''
  "#{code} #{info&.reason}#{values}: #{error.details}"
end

def runs(table)
  [GroupBlocks.new(runs: table.map { |block| BlockRun.new(first: block, count: 1) })]
end

# What tokens of the request have of a block: behind them the destination's last block is zero.
def tokens_of(place, data)
  data.byteslice(0, [TOKENS - place * BLOCK_TOKENS, BLOCK_TOKENS].min * TOKEN_BYTES)
end

def round_trip(prefill, decode, peer)
  id = "ruby-#{Process.pid}"
  source, destination = [7, 2, 9], [0, 5, 3] # block tables, in the order of tokens
  places = (0...LAYERS).to_a.product(PLANES, source.each_index.to_a)
  cache = places.to_h { |place| [place, SecureRandom.bytes(BLOCK_BYTES)] } # any bits: RAW carries them as they are
  prefill.put(source, cache)
  decode.stub.expect(ExpectRequest.new(transfer_id: id, pool: decode.pool, token_count: TOKENS,
                                       blocks: runs(destination)))
  prefill.stub.send(SendRequest.new(transfer_id: id, peer: peer, pool: prefill.pool, token_count: TOKENS,
                                     blocks: runs(source), policy: Policy.new(allocator: :ALLOCATOR_RAW)))
  report = decode.wait(id)
  puts "committed: #{report.kv_bytes} KV bytes, #{report.wire_bytes} on the wire"
  landed = decode.get(destination)
  raise "#{landed.size} blocks came back, not #{cache.size}" unless landed.size == cache.size
  cache.each do |place, data|
    next if tokens_of(place[2], landed[place]) == tokens_of(place[2], data)
    raise "layer #{place[0]}, #{place[1]}, block #{place[2]} differs"
  end
  puts 'every value arrived'
end

abort 'usage: round_trip.rb PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT' if ARGV.size != 3
begin
  prefill = Worker.new(ARGV[0], "ruby-#{Process.pid}-prefill")
  decode = Worker.new(ARGV[1], "ruby-#{Process.pid}-decode")
  round_trip(prefill, decode, ARGV[2])
  begin
    decode.stub.get_transfer(GetTransferRequest.new(transfer: TransferKey.new(transfer_id: 'nobody')))
  rescue GRPC::BadStatus => error
    puts "refused: #{explain(error)}"
  end
  prefill.stop
  decode.stop
rescue GRPC::BadStatus => error
  abort "round_trip.rb: #{explain(error)}"
end
